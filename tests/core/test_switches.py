"""torch's switches for the whole process: TF32 only while it is asked for and nobody needs fp32; convolutions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.src.core.backends import ModelUnsupported, OutOfMemory
from app.src.core.backends.hashing import HashingBackend
from app.src.core.backends.torch import backend as pytorch
from app.src.core.backends.torch.process import Tf32Switch
from app.src.core.device import PRECISIONS, DeviceProfile, Precision
from app.src.core.loading import EngineOptions, load_engine

T4, A100 = DeviceProfile.of_card("Tesla T4"), DeviceProfile.of_card("NVIDIA A100")
CPU = DeviceProfile.cpu()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    import torch

    found: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", found.append)
    return found


@pytest.mark.parametrize("capability", [(6, 1), (7, 5), (8, 0), (8, 9), (9, 0), (12, 0)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_tf32_exists_from_8_0_on_and_is_on_only_when_asked_for(
    written: list[str], capability: tuple[int, int], precision: Precision
) -> None:
    on = Tf32Switch().hold(DeviceProfile.cuda("x", capability), precision)
    assert on is (precision == "tf32" and capability >= (8, 0))
    assert written == ["high"] * on
    assert not Tf32Switch().hold(CPU, "tf32")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(PRECISIONS), st.booleans())))
def test_never_on_while_an_engine_holds_fp32(written: list[str], events: list[tuple[Precision, bool]]) -> None:
    """Whatever comes and goes: on exactly while tf32 is held and fp32 is not, and written only when that changes."""
    written.clear()
    switch, held = Tf32Switch(), dict.fromkeys(PRECISIONS, 0)
    for precision, begins in events:
        if not begins and not held[precision]:
            continue
        held[precision] += 1 if begins else -1
        on = (switch.hold if begins else switch.release)(A100, precision)
        assert on is (held["tf32"] > 0 and held["fp32"] == 0)
        assert ("high" if on else "highest") == (written[-1] if written else "highest")
    assert all(one != other for one, other in pairwise(written))


def test_an_engine_holds_its_precision_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []

    class Recording(Tf32Switch):
        def hold(self, profile: DeviceProfile, precision: Precision, by: int = 1) -> bool:
            events.append((precision, by))
            return super().hold(profile, precision, by)

    monkeypatch.setattr(pytorch, "TF32", Recording())
    engine = load_engine(EngineOptions(device="cpu", precision="fp32"))
    assert events == [("fp32", 1)]
    engine.close()
    engine.close()
    assert events == [("fp32", 1), ("fp32", -1)]


@pytest.mark.usefixtures("written")
def test_an_engine_that_was_not_loaded_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is refused must not keep TF32 off, or on, for all others."""

    def refuse(*_given: object, **_named: object) -> None:
        raise ModelUnsupported("planted")

    switch = Tf32Switch()
    monkeypatch.setattr(pytorch, "TF32", switch)
    monkeypatch.setattr(pytorch, "detect", lambda _device: A100)
    monkeypatch.setattr(pytorch, "load_encoder", refuse)
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda *_: None)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _index: 0)
    for precision in ("fp32", "tf32"):
        with pytest.raises(ModelUnsupported):
            load_engine(EngineOptions(precision=precision))
    assert switch.hold(A100, "fp16") is False
    assert switch.hold(A100, "tf32") is True


def test_an_engine_that_cannot_be_made_closes_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    class Backend(HashingBackend):
        def used_bytes(self) -> int:
            raise OutOfMemory("planted")

        def start_tokenizers(self, *_: object) -> None: ...

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr("app.src.core.loading._backend", lambda *_: Backend("hash:8"))
    with pytest.raises(OutOfMemory, match="planted"):
        load_engine(EngineOptions("any"))
    assert closed == [True]

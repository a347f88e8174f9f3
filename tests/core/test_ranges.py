"""Named ranges: nothing when nobody looks, each in its place when somebody does, NVTX's on a card alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from app.src.core import loading as engines
from app.src.core import ranges
from app.src.core.device import DeviceProfile
from app.src.core.engine import EmbeddingEngine
from app.src.core.loading import EngineOptions, load_engine


class Seen:
    def __init__(self) -> None:
        self.log: list[str] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.log.append(f"<{name}")
        try:
            yield
        finally:
            self.log.append(f"{name}>")


@ranges.ranged("inner")
def inner(number: int) -> int:
    return 2 // number


@ranges.ranged("outer")
def outer(number: int) -> int:
    return inner(number) + 1


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    monkeypatch.setattr(ranges, "_open", None)
    monkeypatch.setattr(torch.cuda.nvtx, "range", found)
    return found


def test_ranges_nest_and_end_with_errors(seen: Seen) -> None:
    assert outer(2) == 2
    assert not seen.log
    ranges.show_to_nvtx()
    assert outer(1) == 3
    with pytest.raises(ZeroDivisionError):
        outer(number=0)
    assert seen.log == ["<outer", "<inner", "inner>", "outer>"] * 2


def test_the_function_keeps_its_name() -> None:
    assert inner.__name__ == "inner"


STEPS = ["<tokenise", "tokenise>", "<copy", "copy>", "<forward", "<pool", "pool>", "forward>"]


def test_an_engine_names_what_it_does(minilm: EmbeddingEngine, seen: Seen) -> None:
    ranges.show_to_nvtx()
    minilm.embed(["oil leaks at the pump"])
    assert seen.log == STEPS


def test_padded_batches_name_the_same(seen: Seen) -> None:
    with load_engine(EngineOptions(device="cpu", precision="fp32", packed=False)) as padded:
        ranges.show_to_nvtx()
        padded.embed(["oil leaks at the pump"])
    assert seen.log == STEPS


@pytest.mark.usefixtures("seen")
@pytest.mark.parametrize(("profile", "asked", "shown"), [("card", True, 1), ("card", False, 0), ("cpu", True, 0)])
def test_profiling_is_for_cards(monkeypatch: pytest.MonkeyPatch, profile: str, asked: bool, shown: int) -> None:
    from app.src.core.backends.torch.backend import TorchBackend

    class Loaded:
        def __init__(self) -> None:
            self.profile = DeviceProfile.of_card("Tesla T4") if profile == "card" else DeviceProfile.cpu()

    monkeypatch.setattr(TorchBackend, "load", lambda _options: Loaded())
    monkeypatch.setattr(engines, "EmbeddingEngine", lambda _backend, _limits: None)
    load_engine(EngineOptions(profiling=asked))
    assert (ranges._open is not None) == bool(shown)

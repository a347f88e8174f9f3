"""Named ranges: nothing when nobody looks, each in its place when somebody does, NVTX's on a card alone."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from app.src.core import loading as engines
from app.src.core import ranges
from app.src.core.device import DeviceProfile
from app.src.core.engine import EmbeddingEngine
from app.src.core.loading import EngineOptions, load_engine
from app.src.core.measuring.embedding import RANGES, TracedRange, _summed, write_trace


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


def test_ranges_nest_and_end_with_errors() -> None:
    seen, also = Seen(), Seen()
    with ranges.shown_to(seen):
        assert outer(1) == 3
        with ranges.shown_to(also), pytest.raises(ZeroDivisionError):
            outer(number=0)
    assert outer(2) == 2
    assert seen.log == ["<outer", "<inner", "inner>", "outer>"] * 2
    assert also.log == ["<outer", "<inner", "inner>", "outer>"]


def test_the_function_keeps_its_name() -> None:
    assert inner.__name__ == "inner"


def test_an_engine_names_what_it_does(minilm: EmbeddingEngine) -> None:
    seen = Seen()
    with ranges.shown_to(seen):
        minilm.embed(["oil leaks at the pump"])
    assert seen.log == ["<tokenise", "tokenise>", "<copy", "copy>", "<forward", "<pool", "pool>", "forward>"]


def test_padded_batches_name_the_same() -> None:
    seen = Seen()
    with load_engine(EngineOptions(device="cpu", precision="fp32", packed=False)) as padded, ranges.shown_to(seen):
        padded.embed(["oil leaks at the pump"])
    assert seen.log == ["<tokenise", "tokenise>", "<copy", "copy>", "<forward", "<pool", "pool>", "forward>"]


@pytest.fixture
def _forgets_openers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_openers", ())


@pytest.mark.usefixtures("_forgets_openers")
def test_nvtx_is_given_the_names_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen()
    monkeypatch.setattr(torch.cuda.nvtx, "range", seen)
    ranges.show_to_nvtx()
    ranges.show_to_nvtx()
    assert outer(1) == 3
    assert seen.log == ["<outer", "<inner", "inner>", "outer>"]


@pytest.mark.usefixtures("_forgets_openers")
@pytest.mark.parametrize(("profile", "asked", "shown"), [("card", True, 1), ("card", False, 0), ("cpu", True, 0)])
def test_profiling_is_for_cards(monkeypatch: pytest.MonkeyPatch, profile: str, asked: bool, shown: int) -> None:
    from app.src.core.backends.torch.backend import TorchBackend

    class Loaded:
        def __init__(self) -> None:
            self.profile = DeviceProfile.of_card("Tesla T4") if profile == "card" else DeviceProfile.cpu()

    monkeypatch.setattr(TorchBackend, "load", lambda _options: Loaded())
    monkeypatch.setattr(engines, "EmbeddingEngine", lambda _backend, _limits: None)
    load_engine(EngineOptions(profiling=asked))
    assert len(ranges._openers) == shown


def test_a_trace_holds_every_range(minilm: EmbeddingEngine, tmp_path: Path) -> None:
    trace = write_trace(minilm, tmp_path / "trace.json")
    written = (tmp_path / "trace.json").read_text(encoding="utf-8")
    assert "pump motor" not in written, "texts have no place in a trace"
    events = json.loads(written)["traceEvents"]
    named = {name: [each for each in events if each.get("name") == name and "dur" in each] for name in RANGES}
    assert all(named.values()), {name: len(found) for name, found in named.items()}
    (whole,) = named["embed"]
    for name in RANGES[1:]:
        for each in named[name]:
            assert whole["ts"] <= each["ts"]
            assert each["ts"] + each["dur"] <= whole["ts"] + whole["dur"] + 1
    assert {each.name: each.calls for each in trace.ranges} == {name: len(found) for name, found in named.items()}
    summed = {each.name: each.host_milliseconds for each in trace.ranges}
    assert summed["pool"] < summed["forward"] < summed["embed"]
    assert all(each.device_milliseconds is None for each in trace.ranges)
    assert not ranges._openers


def test_an_older_trace_does_not_pass_for_one_that_was_not_written(
    minilm: EmbeddingEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "trace.json"
    file.write_text("older", encoding="utf-8")
    recorded = SimpleNamespace(export_chrome_trace=lambda _file: None)  # the profiler prints its errors, and goes on
    monkeypatch.setattr("app.src.core.measuring.embedding._record", lambda *_: recorded)
    with pytest.raises(OSError, match="wrote no trace"):
        write_trace(minilm, file)


def test_a_cards_own_rows_of_a_range_do_not_count_as_the_hosts() -> None:
    def row(device: str, calls: int, host: float, device_time: float) -> SimpleNamespace:
        kind = SimpleNamespace(name=device)
        return SimpleNamespace(
            key="forward", device_type=kind, count=calls, cpu_time_total=host, device_time_total=device_time
        )

    recorded = SimpleNamespace(key_averages=lambda: [row("CPU", 3, 2000.0, 9000.0), row("CUDA", 7, 0.0, 8000.0)])
    assert _summed(recorded, on_card=True) == [TracedRange("forward", 3, 2.0, 9.0)]


@pytest.mark.gpu
def test_a_trace_of_the_card_has_kernels_and_device_time(tmp_path: Path) -> None:
    with load_engine(EngineOptions(device="cuda", profiling=True)) as engine:
        trace = write_trace(engine, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert any(each.get("cat") == "kernel" for each in events)
    assert {each.name for each in trace.ranges} == set(RANGES)

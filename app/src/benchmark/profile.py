"""Where the time of embedding goes: each part of a packed encoder on a CPU, and its products against the same products
alone, in alternating rounds.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from app.src.benchmark.harness import Figure, Report, Say, machine, significant
from app.src.benchmark.workloads import texts
from app.src.core.engine import Engine
from connector.errors import ConfigurationError

if TYPE_CHECKING:
    from app.src.core.backends.torch.packed import PackedEncoder

PARTS = (
    *("tokenising", "queue, batches, Python", "embedding lookup", "QKV", "attention", "attention out", "wide + GELU"),
    *("narrow", "sums and norms", "pooling", "rest"),
)
COLUMNS = ("part", "seconds", "share", "floor_seconds", "share_of_floor")


def packed_encoder(engine: Engine) -> PackedEncoder:
    """Return the encoder of an engine. Raises ConfigurationError if it is not packed, in int8, or not on a CPU."""
    from app.src.core.backends.torch.packed import PackedEncoder

    encoder = getattr(getattr(engine, "_backend", None), "_encoder", None)
    if isinstance(encoder, PackedEncoder) and engine.profile.kind == "cpu" and engine.precision != "int8":
        return encoder
    raise ConfigurationError(
        f"{engine.model} is computed in {engine.precision} by the path {engine.path} on {engine.profile.kind} "
        f"({engine.path_reason}); --profile needs one engine with the packed path on a CPU, not in int8"
    )


def measure(engine: Engine, say: Say, *, rounds: int = 5, scale: float = 0.5, threads: int) -> Report:
    """Profile short, skewed and long texts. The parts are those of the round with the median time; "rest" is negative
    if tokenising overlapped with computing. Raises ConfigurationError."""
    encoder = packed_encoder(engine)
    from app.src.core.backends.torch.profile import Floors, clocked

    about = {"model": engine.model, "precision": engine.precision, "path": engine.path, "device": engine.profile.name}
    report = Report("embed --profile", machine(), about | {"threads": threads, "scale": scale})
    for load, some in texts(scale).items():
        say(f"{load}: {rounds} rounds of {len(some)} texts")
        found: list[tuple[float, dict[str, float], dict[str, float]]] = []
        floors, before, after = Floors(), engine.stats(), engine.stats()
        for _ in range(rounds + 1):
            before = after
            with clocked(encoder) as clock:
                start = time.perf_counter()
                engine.embed(some)
                whole = time.perf_counter() - start
            after = engine.stats()
            parts = dict(clock.seconds)
            inside, tokenising = parts.pop("encoder"), after.tokenize_seconds - before.tokenize_seconds
            parts["embedding lookup"] = inside - parts.pop("layers") - parts["pooling"]
            parts["tokenising"], parts["queue, batches, Python"] = tokenising, whole - inside - tokenising
            parts["rest"] = whole - sum(parts.values())
            found.append((whole, parts, floors.seconds(clock.products)))
        found = found[1:]  # the first warms up
        whole, parts, alone = sorted(found, key=lambda each: each[0])[len(found) // 2]
        shares = [sum(floor.values()) / seconds for seconds, _, floor in found]
        tokens, batches = after.tokens - before.tokens, after.batches - before.batches
        more = {"seconds": significant(whole), "texts": len(some), "tokens": tokens, "batches": batches}
        report.figures.append(Figure(f"{load}: products alone / all", shares, "", more=more))
        report.details[load] = [
            {
                "part": part,
                "seconds": significant(parts[part]),
                "share": round(parts[part] / whole, 4),
                "floor_seconds": significant(alone[part]) if part in alone else None,
                "share_of_floor": round(alone[part] / parts[part], 3) if part in alone else None,
            }
            for part in PARTS
        ]
    return report

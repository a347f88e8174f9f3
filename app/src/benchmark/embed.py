"""Compare the speed and results of our embedding engine with other engines, on the same texts in alternating rounds.
Each peer runs in its own process at its best setting.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from app.src.benchmark.harness import (
    PeerUnavailable,
    Report,
    Say,
    Work,
    interleaved,
    machine,
    significant,
)
from app.src.benchmark.peers import DEFAULT_FOLDER, PeerProcess
from app.src.benchmark.workloads import texts
from app.src.core.agreement import agreement
from app.src.core.backends.folder import find_folder
from app.src.core.engine import Engine
from app.src.settings import EmbeddingSettings
from connector.processors import processors

OURS = "ours"
PAUSE = 0.25  # seconds between turns: thread pools of other engines spin for up to 0.2 s after their work


def measure(  # noqa: PLR0913 - the options of the verb
    engine: Engine,
    settings: EmbeddingSettings,
    peers: Sequence[str],
    say: Say,
    *,
    rounds: int = 5,
    scale: float = 0.5,
    folder: Path = DEFAULT_FOLDER,
    others: Sequence[Engine] = (),
) -> Report:
    """Measure all peers on workloads of this scale. `engine` must have been loaded from `settings`. `others`: the same
    model in other precisions, measured in the same rounds. Raises PeerUnavailable if a peer fails.

    A figure is called "short: onnx / ours"; with `others`, "short: onnx / bf16" for each precision. "their_overlap" is
    each peer's share of the ten nearest in common with the first peer.
    """
    threads = settings.threads or processors()
    about = {"model": engine.model, "precision": engine.precision, "path": engine.path, "device": engine.profile.name}
    engines = {each.precision if others else OURS: each for each in (engine, *others)}
    report = Report("embed", machine(), about | {"threads": threads, "rounds": rounds, "scale": scale})
    model = settings.model if settings.hashing else str(find_folder(settings.model, settings.revision, settings.cache))
    # A missing peer raises here, before any is started.
    processes = {process.name: process for process in (PeerProcess(name, "embed", folder) for name in peers)}
    if settings.hashing and (unable := [name for name, process in processes.items() if process.environment]):
        raise PeerUnavailable(
            f'"{settings.model}" is the test embedder, which {unable[0]} cannot load: set another model'
        )
    with ExitStack() as held:
        place = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="owl-sap-benchmark-")))
        for name, process in processes.items():
            say(f"starting {name}")
            held.enter_context(process)
            cache = str(process.cache / engine.weights_sha256[:16])
            loaded = process.ask("load", model=model, device=engine.profile.kind, threads=threads, cache=cache)
            report.peers[name] = process.versions | loaded.get("about", {})
        for load, some in texts(scale).items():
            file = place / f"{load}.json"
            # Every peer computes what we do: its texts begin with the prompt, and it adds none of its own.
            file.write_text(json.dumps([engine.prompts["document"] + text for text in some]), encoding="utf-8")
            tuned = {}
            for name, process in processes.items():
                say(f"{load}: searching for the best setting of {name}")
                tuned[name] = process.ask("tune", texts=str(file)).get("setting")
            say(f"{load}: {rounds} rounds of {', '.join((*engines, *processes))}")

            def ours(own: Engine, some: Sequence[str] = some) -> tuple[float, float]:
                start, before = time.perf_counter(), time.process_time()
                own.embed(some)
                return time.perf_counter() - start, time.process_time() - before

            def theirs(name: str, file: Path = file) -> tuple[float, float]:
                took = processes[name].ask("embed", texts=str(file))
                return float(took["seconds"]), float(took["cpu_seconds"])

            works: dict[str, Work] = {name: partial(ours, own) for name, own in engines.items()}
            done = interleaved(works | {name: partial(theirs, name) for name in processes}, rounds, pause=PAUSE)
            tokens, vectors, overlaps = sum(engine.count_tokens(some)), {}, {}
            for name in processes:
                processes[name].ask("embed", texts=str(file), out=str(place / f"{load}.npy"))
                vectors[name] = np.load(place / f"{load}.npy")
                overlaps[name] = significant(agreement(vectors[name], next(iter(vectors.values())))[2])
            for own, each in engines.items():
                made = each.embed(some)
                for name in processes:
                    mean, least, overlap = agreement(made, vectors[name])
                    report.figures.append(
                        done.ratio(
                            f"{load}: {name} / {own}",
                            name,
                            own,
                            setting=tuned[name],
                            texts=len(some),
                            tokens=tokens,
                            tokens_per_second=significant(tokens / done.median(own)),
                            their_tokens_per_second=significant(tokens / done.median(name)),
                            least_cosine=significant(least, 7),
                            mean_cosine=significant(mean, 7),
                            top_10_overlap=significant(overlap),
                            their_overlap=overlaps[name],
                        )
                    )
    return report

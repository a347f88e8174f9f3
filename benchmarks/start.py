"""How long until a new process of `owl-sap` answers?

    python benchmarks/start.py [verbs] [serve] [models] [--rounds 5] [--out benchmarks/results/start.json]

    verbs   seconds of whole processes, disk cache warm: `search` and `embed` with the default model, over a process
            that only imports torch (<= 1.0), `search` with hash:384 (<= 0.7), `--help` (<= 0.25); CPU seconds likewise
    serve   seconds from the start of the process until GET /health/ready returns 200, disk cache warm  <= 4
    models  seconds of a process that loads another packaged model, which the first run converts  <= 3

All have a local store, the verbs one with TEXTS texts; HANA is not contacted. The first start is not counted: it fills
the disk cache. Bytecode is cached, as pip does when it installs.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from app.src.access.principal import OPERATOR
from app.src.benchmark.harness import SCATTER, Figure, Report, interleaved
from app.src.benchmark.workloads import material_text
from app.src.demo import announced
from app.src.service.service import Service
from app.src.settings import load
from benchmarks.program import at_most, main
from connector.sync.documents import NewDocument

MODEL, HASHING, TEXTS = "all-MiniLM-L6-v2", "hash:384", 1000
TORCH = "import torch"
TARGETS = {
    f"search, over {TORCH}": at_most(1.0),
    f"embed, over {TORCH}": at_most(1.0),
    f"search, {HASHING}": at_most(0.7),
    "--help": at_most(0.25),
    "owl-sap serve, until ready": at_most(4.0),
}
ENVIRONMENT = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def process(*arguments: str, folder: Path, stdin: str = "") -> tuple[float, float]:
    """Run Python in the folder; return its seconds and CPU seconds."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, *arguments]
    subprocess.run(command, cwd=folder, env=ENVIRONMENT, input=stdin, text=True, capture_output=True, check=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def filled(folder: Path, model: str) -> Path:
    """Write owl-sap.toml and a local store with one collection to a new folder, and return it."""
    folder.mkdir()
    (folder / "owl-sap.toml").write_text(
        f'[store]\nkind = "local"\npath = "{folder}"\n[embedding]\nmodel = "{model}"\n'
        '[[collections]]\nname = "materials"\ndocuments = true\n',
        encoding="utf-8",
    )
    with closing(Service(load(folder=folder).settings)) as service:
        texts = [NewDocument(str(number), material_text(number)) for number in range(TEXTS)]
        service.documents.put("materials", texts, principal=OPERATOR)
    return folder


def verbs(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as above:
        real, hashing = filled(Path(above) / "real", MODEL), filled(Path(above) / "hashing", HASHING)
        search = ("-m", "app", "search", "materials", "a pump of stainless steel", "--json")
        works = {
            TORCH: partial(process, "-c", TORCH, folder=real),
            "search": partial(process, *search, folder=real),
            "embed": partial(process, "-m", "app", "embed", "--json", folder=real, stdin="a steel pump\n"),
            f"search, {HASHING}": partial(process, *search, folder=hashing),
            "--help": partial(process, "-m", "app", "--help", folder=hashing),
        }
        rounds = interleaved(works, given.rounds)
    for work in works:
        name = f"{work}, over {TORCH}" if work in ("search", "embed") else work
        for kind, found in (("", rounds.took), (", CPU", rounds.busy)):
            base = found[TORCH] if name != work else [0.0] * given.rounds
            took = [max(0.0, mine - other) for mine, other in zip(found[work], base, strict=True)]
            # A difference scatters more than its terms, and may be near 0.
            scatter = SCATTER if name == work else math.inf
            yield Figure(f"{name}{kind}", took, "s", None if kind else TARGETS.get(name), scatter=scatter)


def serve(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"OWL_SAP_STORE__KIND": "local", "OWL_SAP_STORE__PATH": folder}

        def run() -> float:
            """Start the service, return the seconds until it is ready, and end it."""
            start = time.perf_counter()
            with announced(
                [sys.executable, "-m", "app", "serve", "--port", "0"], Path(folder), ENVIRONMENT | settings
            ) as (_, greeting):
                while True:
                    try:
                        with urllib.request.urlopen(f"{greeting['url']}/health/ready", timeout=30):
                            return time.perf_counter() - start
                    except urllib.error.HTTPError:
                        time.sleep(0.01)

        rounds = interleaved({"ready": run}, given.rounds)
    name = "owl-sap serve, until ready"
    yield Figure(name, rounds.took["ready"], "s", TARGETS[name])


def models(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    code = "from app.src.core.loading import *\nload_engine(EngineOptions('{}'))"
    works = {
        f"{model} loaded": partial(process, "-c", code.format(model), folder=Path.cwd())
        for model in ("use-multilingual", "multilingual-e5-small")
    }
    rounds = interleaved(works, given.rounds)
    for name in works:
        yield Figure(name, rounds.took[name], "s", at_most(3.0))


if __name__ == "__main__":
    main("start", __doc__ or "", {"verbs": verbs, "serve": serve, "models": models})

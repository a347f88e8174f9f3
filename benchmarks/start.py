"""How long until `owl-sap serve` answers?

    python benchmarks/start.py [serve] [parts] [--rounds 5] [--out benchmarks/results/start.json]

    serve   seconds from the start of the process until GET /health/ready returns 200, disk cache warm  <= 4
    parts   breakdown of that time: seconds of a Python process that only imports, checks or loads one component, and
            of one that loads another packaged model, which the first run converts  <= 3

The service has the default model and a local store; HANA is not contacted. The first start is not counted: it fills the
disk cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from app.src.benchmark.harness import Figure, Report, at_most, interleaved, main, wall
from app.src.demo import announced

READY = at_most(4.0)
PARTS = {
    "python": "pass",
    "command line": "import app.src.cli.collections",
    "service": "import app.src.service.service, connector.stores.local.store",
    "REST": "import app.src.api.server",
    "checking the model's files": "from app.src.core.backends.folder import *\n"
    "check_files(read_folder(find_folder('all-MiniLM-L6-v2'), 'all-MiniLM-L6-v2'))",
    "torch": "import torch",
    "torch and transformers": "import torch, transformers",
    "engine loaded": "from app.src.core.loading import *\nload_engine(EngineOptions())",
    **{
        f"{model} loaded": f"from app.src.core.loading import *\nload_engine(EngineOptions('{model}'))"
        for model in ("use-multilingual", "multilingual-e5-small")
    },
    "first text embedded": "from app.src.core.loading import *\nload_engine(EngineOptions()).embed(['warm'])",
}


def serve(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"OWL_SAP_STORE__KIND": "local", "OWL_SAP_STORE__PATH": folder}

        def run() -> float:
            """Start the service, return the seconds until it is ready, and end it."""
            start = time.perf_counter()
            with announced(
                [sys.executable, "-m", "app", "serve", "--port", "0"], Path(folder), os.environ | settings
            ) as (_, greeting):
                while True:
                    try:
                        with urllib.request.urlopen(f"{greeting['url']}/health/ready", timeout=30):
                            return time.perf_counter() - start
                    except urllib.error.HTTPError:
                        time.sleep(0.01)

        rounds = interleaved({"ready": run}, given.rounds)
    yield rounds.figure("owl-sap serve, until ready", "ready", target=READY)


def parts(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    works = {
        name: wall(partial(subprocess.run, [sys.executable, "-c", code], check=True)) for name, code in PARTS.items()
    }
    rounds = interleaved(works, given.rounds)
    for name in works:
        yield rounds.figure(name, name, target=at_most(3.0) if name.endswith(" loaded") and "multi" in name else None)


if __name__ == "__main__":
    main("start", __doc__ or "", {"serve": serve, "parts": parts})

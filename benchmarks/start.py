"""How long until `owl-sap serve` answers?

    python benchmarks/start.py [serve] [parts] [--rounds 5] [--out benchmarks/results/start.json]

    serve   seconds from the start of the process until GET /health/ready says 200, from a warm disk    <= 4
    parts   what that time is made of: seconds of a Python that only imports, checks or loads one thing more

The service has the default model and a local store; HANA is not asked. The first start is not counted: it fills the
disk's cache.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from app.src.benchmark.harness import Figure, Report, at_most, interleaved, main, wall  # noqa: E402  # noqa: E402
from app.src.benchmark.processes import announced, serve_command  # noqa: E402

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
    "first text embedded": "from app.src.core.loading import *\nload_engine(EngineOptions()).embed(['warm'])",
}


def serve(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    busy: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        rounds = interleaved({"ready": lambda: until_ready(Path(folder), busy)}, given.rounds)
    spent = round(statistics.median(busy[-given.rounds :]), 2)
    yield rounds.figure("owl-sap serve, until ready", "ready", target=READY, cpu_seconds=spent)


def until_ready(folder: Path, busy: list[float]) -> float:
    """Start the service, return the seconds until it is ready, and end it. `busy` gets its CPU seconds until then."""
    settings = {"OWL_SAP_STORE__KIND": "local", "OWL_SAP_STORE__PATH": str(folder), "PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    with announced(serve_command(), folder, os.environ | settings) as (process, greeting):
        while not answers(f"{greeting['url']}/health/ready"):
            time.sleep(0.01)
        took = time.perf_counter() - start
        busy.append(cpu_seconds(process.pid))
        return took


def cpu_seconds(process: int) -> float:
    """Of all its threads, by Linux; 0 elsewhere."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError:
        return False


def parts(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    busy: dict[str, list[float]] = {name: [] for name in PARTS}
    works = {name: wall(partial(python, code, busy[name])) for name, code in PARTS.items()}
    rounds = interleaved(works, given.rounds)
    for name in works:
        yield rounds.figure(name, name, cpu_seconds=round(statistics.median(busy[name][-given.rounds :]), 2))


def python(code: str, busy: list[float]) -> None:
    """`busy` gets its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


if __name__ == "__main__":
    main("start", __doc__ or "", {"serve": serve, "parts": parts})

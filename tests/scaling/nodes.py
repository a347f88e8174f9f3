"""Nodes of a Ray cluster on this machine, each in a process group of its own that may be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_port


@contextmanager
def node(folder: Path, *arguments: str, **variables: str) -> Iterator[Callable[[], None]]:
    """A node of a cluster in a process group of its own. Yields what kills it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", f"--temp-dir={folder}", *arguments]
    command += ["--object-store-memory=100000000", "--min-worker-port=0", "--max-worker-port=0"]
    file = folder.with_suffix(".log")
    with file.open("w") as log:
        process = subprocess.Popen(
            command,
            env=environment | {"HOME": str(folder.parent), "RAY_USAGE_STATS_ENABLED": "0"} | variables,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def kill() -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    try:
        deadline = time.monotonic() + 120
        while "--block" not in (text := file.read_text()):
            assert process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.3)
        yield kill
    finally:
        kill()


@contextmanager
def head(folder: Path, cpus: int = 2, **variables: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """The first node of a cluster. Yields its address, and what kills it."""
    port = free_port()
    arguments = ["--head", f"--port={port}", f"--num-cpus={cpus}", "--include-dashboard=false"]
    with node(folder, *arguments, "--node-ip-address=127.0.0.1", **variables) as kill:
        yield f"127.0.0.1:{port}", kill

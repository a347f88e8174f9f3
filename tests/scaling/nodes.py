"""Nodes of a Ray cluster on this machine, each a session of processes of its own that may be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.ports import free_port


def kill(node: subprocess.Popen[bytes]) -> None:
    """Kill everything but the workers, which notice it and end by themselves."""
    with suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)
    node.wait()


@contextmanager
def node(folder: Path, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A node of a cluster. Its process leads a group and a session."""
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
    try:
        deadline = time.monotonic() + 120
        while "--block" not in (text := file.read_text()):
            assert process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.3)
        yield process
    finally:
        kill(process)


@contextmanager
def head(folder: Path, cpus: int = 2, **variables: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The first node of a cluster. Yields its address, and its process."""
    port = free_port()
    arguments = ["--head", f"--port={port}", f"--num-cpus={cpus}", "--include-dashboard=false"]
    with node(folder, *arguments, "--node-ip-address=127.0.0.1", **variables) as process:
        yield f"127.0.0.1:{port}", process


@contextmanager
def second(folder: Path, address: str, cpus: int = 1, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another node of the cluster at the address."""
    arguments = ("--address", address, f"--num-cpus={cpus}", "--node-ip-address=127.0.0.2")
    with node(folder, *arguments, **variables) as process:
        yield process

"""`owl-sap` in a process of its own that is forked from one with the imports done: a second less for each command."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.surface.forked_imports"])


def _main(arguments: tuple[str, ...], folder: str, environment: dict[str, str], streams: tuple[str, str, str]) -> None:
    for number, (path, flags) in enumerate(
        zip(streams, (os.O_RDONLY, os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_APPEND), strict=True)
    ):
        os.dup2(os.open(path, flags), number)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace")
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["owl-sap", *arguments]

    from app.src.cli import main

    main()


def run(
    arguments: tuple[str, ...], *, folder: Path, environment: dict[str, str], stdin: str, scratch: Path
) -> subprocess.CompletedProcess[str]:
    """Run `owl-sap` in `folder` as subprocess.run would; the streams are files in `scratch`."""
    streams = [scratch / name for name in ("stdin", "stdout", "stderr")]
    for path, text in zip(streams, (stdin, "", ""), strict=True):
        path.write_text(text, encoding="utf-8")
    process = _processes.Process(
        target=_main, args=(arguments, str(folder), environment, tuple(str(path) for path in streams))
    )
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired(arguments, 120)
    out, err = (path.read_text(encoding="utf-8") for path in streams[1:])
    return subprocess.CompletedProcess(arguments, process.exitcode, out, err)

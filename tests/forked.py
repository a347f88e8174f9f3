"""`owl-sap` in a process of its own, forked from a server that has imported everything: a start takes a second less."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing import connection, reduction
from pathlib import Path
from typing import Any

processes = multiprocessing.get_context("forkserver")
# One server for the session: what is set here must suit every test that forks.
processes.set_forkserver_preload(["pytest", "tests.forked_imports", "tests.proof.worker"])

# Python and torch read these before our code runs: a process that sets them is started anew.
READ_AT_THE_START = ("PYTHON", "LC_", "LANG", "CUDA", "OMP_", "OWL_FAIL")


class _Stream:
    """A file descriptor that goes with the arguments of a forked process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.number),)


def _received(duplicate: Any) -> int:
    number: int = duplicate.detach()
    return number


def _main(arguments: list[str], folder: str | None, environment: dict[str, str], streams: list[int | None]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(os.open(os.devnull, os.O_RDWR) if stream is None else stream, number)
        if stream is not None:
            os.close(stream)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if folder is not None:
        os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["owl-sap", *arguments]

    from app.src.cli import main

    main()


class Forked(subprocess.Popen[Any]):
    """A Popen whose process the server forks: the child of another process, so that waiting for it is done here."""

    _process: Any = None

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        cwd, env = rest[4], rest[5]
        pipes = rest[9:15]
        streams = [_Stream(number) if number != -1 else None for number in (pipes[0], pipes[3], pipes[5])]
        self._waiting = threading.Lock()
        self._process = processes.Process(
            target=_main, args=(args[1:], cwd and os.fspath(cwd), dict(os.environ if env is None else env), streams)
        )
        try:
            self._process.start()
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self.pid = self._process.pid
        self._child_created = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._process is not None:
            with self._waiting:
                self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            connection.wait([self._process.sentinel], timeout)
            if self._internal_poll() is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode


def owl_sap(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, **more: Any
) -> subprocess.Popen[Any]:
    """`subprocess.Popen` of `owl-sap ARGUMENTS`: forked, where the environment and `more` allow it."""
    if "preexec_fn" in more or any(
        name.startswith(READ_AT_THE_START) and name != "PYTHONPATH" and value != os.environ.get(name)
        for name, value in (env or {}).items()
    ):
        return subprocess.Popen([sys.executable, "-m", "app", *arguments], cwd=cwd, env=env, **more)
    return Forked(["owl-sap", *arguments], cwd=cwd, env=env, **more)

"""A peer at work: its worker as a child process in its own environment, asked one thing at a time. So only one side
computes, and what is timed is timed within the worker.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from app.src.benchmark.environments import WORKERS, Peer, PeerUnavailable, python_of
from app.src.benchmark.report import Report
from app.src.benchmark.side_by_side import Work, WorkFailed

_RUN = "import runpy, sys; sys.path.insert(0, sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
_START_SECONDS = 120.0
_ANSWER_SECONDS = 900.0
_STOP_SECONDS = 10.0


@contextlib.contextmanager
def left_out(report: Report, processes: dict[str, PeerProcess], name: str) -> Iterator[None]:
    """One that does not work is dropped from `processes` and noted; the last of them raises PeerUnavailable, unless
    there are figures already."""
    try:
        yield
    except PeerUnavailable as error:
        del processes[name]
        if not processes and not report.figures:
            raise
        report.notes.append(f"left out: {error}")


def in_rounds(work: Work) -> Work:
    """A peer's work that may fail without ending the rounds of the others."""

    def run() -> float:
        try:
            return work()
        except PeerUnavailable as error:
            raise WorkFailed(str(error)) from error

    return run


class PeerProcess:
    """A context. `versions`: of its packages and its Python. Raises PeerUnavailable with the worker's last words."""

    def __init__(self, peer: Peer, folder: Path) -> None:
        self.peer = peer
        self._python = python_of(peer, folder)
        self.cache = (folder / "cache" / (peer.environment or peer.name)).absolute()

    def __enter__(self) -> PeerProcess:
        self._log = tempfile.TemporaryFile()
        # -E -s -P: nothing of ours is in reach but what workers share, wherever the worker's own file lies.
        self._process = subprocess.Popen(
            [str(self._python), "-E", "-s", "-P", "-c", _RUN, str(WORKERS), str(self.peer.worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
        )
        # A pipe cannot be waited on with a limit through Python's buffer; a thread reads, the queue is waited on.
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"owl-sap-peer-{self.peer.name}", daemon=True)
        self._reader.start()
        try:
            greeting = self._answer(_START_SECONDS)
        except BaseException:
            self._process.kill()
            self.__exit__(None, None, None)
            raise
        self.versions: dict[str, str] = greeting.get("versions", {}) | {"python": greeting.get("python", "unknown")}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_STOP_SECONDS if error is None else 0.5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._reader.join()
        process.stdout.close()
        self._log.close()

    def ask(self, action: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": action, **arguments}, default=str) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._broken("it ended") from None
        return self._answer(_ANSWER_SECONDS)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise self._broken(f"no answer within {seconds:.0f} s") from None
        if not line:
            self._lines.put("")  # for whoever asks again
            raise self._broken("it ended")
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self._broken("its answer is no JSON") from None
        if "error" in found:
            raise PeerUnavailable(f"{self.peer.name}: {found['error']}")
        return found

    def _broken(self, what: str) -> PeerUnavailable:
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        return PeerUnavailable(f"{self.peer.name}: {what}{': ' + words[-1] if words else ''}")

"""An emulator in a process of its own that a fuzzer works on, and what must hold of it after every example."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emulator_wire import WireClient
from hana_emulator.testing import Emulator
from tests.fuzz.packets import Reading

REPOSITORY = Path(__file__).resolve().parents[2]

ANSWERED_SECONDS = 30.0
"""A reply takes milliseconds; a machine with many tests at work is given time."""
SETTLED_SECONDS = 60.0
_KEPT_FILE = "hana.sqlite"
"""SQLite keeps descriptors of it, to use them again, as long as any connection has a lock on it."""
_LATE_FILES = 2
"""It opens the log of a connection with the first use."""
_FAULTS_OF_THE_SERVER = ("Traceback", "internal error", "Exception in thread", "ended by")


@dataclass
class Target:
    """The emulator under attack. `stderr` goes to a file: a pipe that nobody reads would fill up and stop it."""

    emulator: Emulator
    stderr: Path
    quiet: tuple[int, int] = (0, 0)
    memory: int = 0
    neighbour: Any = field(default=None)

    def socket(self) -> socket.socket:
        plain = socket.create_connection((self.emulator.host, self.emulator.port), timeout=ANSWERED_SECONDS)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trust = getattr(self.emulator, "trust_store", None)
        if trust is None:
            return plain
        return ssl.create_default_context(cafile=trust).wrap_socket(plain, server_hostname="localhost")

    def login(self) -> WireClient:
        client = WireClient(self.socket())
        client.login(self.emulator.user, self.emulator.password, methods=(b"SCRAMSHA256",))  # the quicker one
        client.socket.settimeout(ANSWERED_SECONDS)
        return client

    def rests(self) -> None:
        """Remember how many threads and descriptors there are, and how much memory; `check` compares."""
        self.check_alive()
        self.quiet = self._steady_counts()
        self.memory = self.rss()

    def check_alive(self) -> None:
        """It runs, a session from before answers, a new client can log in and read."""
        assert self.emulator.process.poll() is None, f"the server died: {self.stderr.read_text()[-2000:]}"
        self.neighbour = self.neighbour or self.emulator.connect(autocommit=True)
        self._read(self.neighbour)
        with contextlib.closing(self.emulator.connect()) as hana:
            self._read(hana)

    @staticmethod
    def _read(hana: Any) -> None:
        began = time.monotonic()
        cursor = hana.cursor()
        cursor.execute("SELECT K, N FROM FUZZED WHERE K = -1")
        assert list(map(tuple, cursor.fetchall())) == [(-1, "untouched")]
        assert time.monotonic() - began < ANSWERED_SECONDS

    def committed(self) -> list[tuple[Any, ...]]:
        cursor = self.neighbour.cursor()
        cursor.execute("SELECT COUNT(*), SUM(K), MAX(N) FROM FUZZED")
        return list(map(tuple, cursor.fetchall()))

    def restore(self) -> None:
        """Delete the rows that an example committed, so that the next one starts from the same state."""
        self.neighbour.cursor().execute("DELETE FROM FUZZED WHERE K <> -1")

    def check_settled(self) -> None:
        """Threads and descriptors are those of a server at rest again."""
        wait_until(self._is_settled, lambda: f"{self._counts()} threads, files; at rest {self.quiet}")

    def _is_settled(self) -> bool:
        threads, files = self._counts()
        return threads <= self.quiet[0] and files <= self.quiet[1] + _LATE_FILES

    def check_memory(self, megabytes: int) -> None:
        grown = (self.rss() - self.memory) >> 20
        assert grown < megabytes, f"the server has grown by {grown} MB"

    def check_quiet(self) -> None:
        """Nothing on stderr tells of a fault inside the server."""
        written = self.stderr.read_text()
        found = [line for line in written.splitlines() if any(word in line for word in _FAULTS_OF_THE_SERVER)]
        assert not found, found[:5]

    def rss(self) -> int:
        pages = int(Path(f"/proc/{self.emulator.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _steady_counts(self) -> tuple[int, int]:
        """Sessions that have ended need a moment to go."""
        last = self._counts()
        while True:
            time.sleep(0.5)
            if (now := self._counts()) == last:
                return now
            last = now

    def _counts(self) -> tuple[int, int]:
        process = Path(f"/proc/{self.emulator.process.pid}")
        files = 0
        for entry in os.listdir(process / "fd"):
            with contextlib.suppress(FileNotFoundError):
                files += not os.readlink(process / "fd" / entry).endswith(_KEPT_FILE)
        return len(os.listdir(process / "task")), files


def wait_until(reached: Callable[[], bool], problem: Callable[[], str]) -> None:
    until = time.monotonic() + SETTLED_SECONDS
    while not reached():
        assert time.monotonic() < until, problem()
        time.sleep(0.01)


@contextlib.contextmanager
def attacked(folder: Path, *arguments: str) -> Iterator[Target]:
    """An emulator that must end its life without a sign of a fault, and with 0."""
    stderr = folder / "stderr.txt"
    command = [sys.executable, "-m", "hana_emulator", "--parent-pid", str(os.getpid()), "--port", "0", *arguments]
    with (
        stderr.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=REPOSITORY) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, stderr.read_text()
            target = Target(Emulator(process, **json.loads(line)), stderr)
            yield target
            if target.neighbour is not None:
                target.neighbour.close()
            assert target.emulator.stop() == 0
            target.check_quiet()
        finally:
            process.kill()


def converse(client: WireClient, packets: Sequence[bytes]) -> list[bytes]:
    """Send packets one by one, wait for the reply to each that is whole, and give the requests that were. Fails when
    a whole packet gets neither a reply nor the end of the connection in time."""
    reading = Reading()
    whole: list[bytes] = []
    try:
        for packet in packets:
            client.socket.sendall(packet)
            for request in reading.sent(packet):
                whole.append(request)
                client.answer()
            if reading.broken:
                client.socket.shutdown(socket.SHUT_WR)
                while client.socket.recv(1 << 16):
                    pass
                break
    except (EOFError, ConnectionError, ssl.SSLError):
        pass
    return whole

"""The clients of benchmarks/load.py (benchmarks/load_clients.py is a module, not a program): many connections from one
event loop, each comparing its answers with the expected ones; and clients that are slow, never read, or send too much.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_RETRY = re.compile(rb"\r\nretry-after: \d+\r\n", re.IGNORECASE)
_OK, _TOO_LARGE, _REFUSED = 200, 413, 429
_ESTABLISHED = 1
_PIECE = b"x" * 65_536

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Question:
    """The bytes of a request, and whether the body of its answer is right."""

    kind: str
    content: bytes
    right: Callable[[bytes], bool]


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    head: bytes
    body: bytes


@dataclass(slots=True)
class Tally:
    """What came of requests. Seconds from the first byte sent to the last one received, by kind of question;
    `failures`: anything that is neither an answer nor a refusal that says when to come back."""

    accepted: dict[str, list[float]] = field(default_factory=dict)
    refused: list[float] = field(default_factory=list)
    wrong: int = 0
    failures: list[str] = field(default_factory=list)
    lost: int = 0  # connections that the server ended

    @property
    def seconds(self) -> list[float]:
        return [one for each in self.accepted.values() for one in each]

    def count(self, question: Question, answer: Answer, seconds: float) -> None:
        if answer.status == _OK:
            self.accepted.setdefault(question.kind, []).append(seconds)
            self.wrong += not question.right(answer.body)
        elif answer.status == _REFUSED and _RETRY.search(answer.head):
            self.refused.append(seconds)
        else:
            self.failures.append(f"{question.kind}: status {answer.status}")


class Line(asyncio.Protocol):
    """One connection, kept alive. One request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._whole = -1
        self._body_at = 0
        self._waiting: asyncio.Future[Answer] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by name

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._end(error or ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._whole < 0 and (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            found = _LENGTH.search(self._buffer, 0, end + 2)
            if found is None:
                self._end(ValueError("an answer without its length"))
                return
            self._body_at = end + 4
            self._whole = self._body_at + int(found[1])
        if 0 <= self._whole <= len(self._buffer):
            content = bytes(self._buffer)
            self._buffer.clear()
            answer = Answer(int(content[9:12]), content[: self._body_at - 2], content[self._body_at :])
            self._whole = -1
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(answer)

    def _end(self, error: Exception) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)

    async def ask(self, content: bytes) -> Answer:
        """Raises ConnectionError where the connection has ended."""
        if self.transport is None:
            raise ConnectionResetError("the server closed the connection")
        self._waiting = asyncio.get_running_loop().create_future()
        self.transport.write(content)
        return await self._waiting

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()


async def connected(address: Address) -> Line:
    _, line = await asyncio.get_running_loop().create_connection(Line, *address)
    return line


@dataclass(slots=True)
class Crowd:
    """Connections that stay. `pause`: seconds between an answer and the next request, half to one and a half of it."""

    address: Address
    questions: Sequence[Question]
    pause: float
    lines: list[Line] = field(default_factory=list)

    async def connect(self, count: int) -> None:
        """So many; fifty at a time."""
        for start in range(0, count, 50):
            self.lines += await asyncio.gather(*(connected(self.address) for _ in range(min(50, count - start))))

    def close(self) -> None:
        for line in self.lines:
            line.close()

    async def ask(self, seconds: float, seed: int = 0) -> Tally:
        """Every connection asks one question after the other for so long, and waits for its last answer."""
        tally = Tally()
        until = time.perf_counter() + seconds
        await asyncio.gather(*(self._client(at, until, seed + at, tally) for at in range(len(self.lines))))
        return tally

    async def _client(self, at: int, until: float, seed: int, tally: Tally) -> None:
        rng = random.Random(seed)
        if self.pause:
            await asyncio.sleep(rng.random() * self.pause)
        while (start := time.perf_counter()) < until:
            question = rng.choice(self.questions)
            try:
                answer = await self.lines[at].ask(question.content)
            except (OSError, ValueError) as error:
                tally.lost += 1
                tally.failures.append(f"{question.kind}: {type(error).__name__}")
                await asyncio.sleep(0.1)
                self.lines[at] = await connected(self.address)
                continue
            tally.count(question, answer, time.perf_counter() - start)
            if self.pause:
                await asyncio.sleep(self.pause * (0.5 + rng.random()))


# ------------------------------------------------------------------------------------------------------ slow clients


def _open(sock: socket.socket) -> bool:
    """By the state of the connection, for who reads nothing sees no end of it (tcp_info's first byte, Linux)."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


@dataclass(slots=True)
class Slow:
    """Clients that hold a connection and give or take next to nothing. `closed`: those whom the server has told to go,
    by kind; `held` those that were still there at the end."""

    address: Address
    header: bytes
    """The head of a POST with a body, without the empty line at its end."""
    large: bytes
    """A request whose answer does not fit into the buffers of the sockets."""
    closed: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)

    async def run(self, count: Mapping[str, int], seconds: float) -> None:
        """So many of each kind, for so long."""
        until = time.perf_counter() + seconds
        kinds = {"header": self._header, "body": self._body, "reader": self._reader}
        all_of_them = (self._one(kind, kinds[kind], until) for kind, number in count.items() for _ in range(number))
        await asyncio.gather(*all_of_them)

    async def _one(self, kind: str, client: Callable[[socket.socket, float], Awaitable[None]], until: float) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, self.address)
            try:
                await client(sock, until)
                gone = False
            except OSError:
                gone = True
        counts = self.closed if gone else self.held
        counts[kind] = counts.get(kind, 0) + 1

    async def _header(self, sock: socket.socket, until: float) -> None:
        await self._drip(sock, self.header + b"\r\n" + b"X-Slow: 1\r\n" * 10_000, until)

    async def _body(self, sock: socket.socket, until: float) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, self.header + b"Content-Length: 1000\r\n\r\n")
        await self._drip(sock, b" " * 1000, until)

    async def _drip(self, sock: socket.socket, content: bytes, until: float) -> None:
        """A byte a second; raises OSError once the server has closed."""
        loop = asyncio.get_running_loop()
        for byte in content:
            if time.perf_counter() > until:
                return
            await loop.sock_sendall(sock, bytes([byte]))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    if not await loop.sock_recv(sock, 65_536):
                        raise ConnectionResetError

    async def _reader(self, sock: socket.socket, until: float) -> None:
        """Asks for much, four times, and reads nothing of it."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, self.large * 4)
        while time.perf_counter() < until:
            await asyncio.sleep(0.5)
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or not _open(sock):
                raise ConnectionResetError


# ------------------------------------------------------------------------------------------------------- huge bodies


@dataclass(slots=True)
class Huge:
    """`seconds`: until the refusal came; `sent`: bytes that had left by then; `unanswered`: why no 413 came."""

    seconds: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)


async def send_huge(address: Address, header: bytes, size: int, *, declared: bool, huge: Huge) -> None:
    """A body of `size` bytes, with its length or in chunks, sent while nothing has been answered."""
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(*address)
    sent = 0

    async def send() -> None:
        nonlocal sent
        length = f"Content-Length: {size}" if declared else "Transfer-Encoding: chunked"
        writer.write(header + length.encode() + b"\r\n\r\n")
        piece = _PIECE if declared else b"%x\r\n%s\r\n" % (len(_PIECE), _PIECE)
        while sent < size:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)  # drain waits only for a full buffer: the answer must be seen before all has left
            sent += len(_PIECE)

    sending = asyncio.create_task(send())
    try:
        async with asyncio.timeout(60):
            line = await reader.readline()
    except (OSError, TimeoutError) as error:
        line = type(error).__name__.encode()
    huge.seconds.append(time.perf_counter() - start)
    huge.sent.append(sent)
    if line.split(b" ")[1:2] != [str(_TOO_LARGE).encode()]:
        huge.unanswered.append(line[:40].decode(errors="replace") or "closed without an answer")
    sending.cancel()
    with contextlib.suppress(OSError, asyncio.CancelledError):
        await sending
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


# --------------------------------------------------------------------------------------------------- this process too


@contextlib.asynccontextmanager
async def lag_watched(lags: list[float]) -> AsyncIterator[None]:
    """How late this event loop is, every 20 ms: what of a figure may be the clients' own doing."""

    async def watch() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.02)
            lags.append(time.perf_counter() - start - 0.02)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()

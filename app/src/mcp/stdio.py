"""Tools over standard input and output, for the program that started this process. Only the protocol is written to
stdout, even if a library prints."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from typing import Any, cast

import anyio
from mcp.server.stdio import stdio_server

from app.src.access.principal import OPERATOR, Principal, Unauthenticated
from app.src.access.rates import Rates
from app.src.mcp.server import Agents
from app.src.mcp.tools import Answer, Refused
from app.src.service.service import Service
from connector.errors import ConfigurationError


class Parent:
    """The caller on stdin: the operator, or the principal of the configured key. The key is checked for each request,
    so a revoked or expired one is rejected at once; its limits apply as in the REST service."""

    def __init__(self, service: Service) -> None:
        """Raise ConfigurationError if mcp.key is set but neither access.keys nor access.jwt is."""
        self._access = service.access
        key = service.settings.mcp.key
        self._key = None if key is None else key.get_secret_value().strip()
        if self._key is not None and not self._access.configured:
            raise ConfigurationError("mcp.key is set, but neither access.keys nor access.jwt: no key is known here")
        limits = service.settings.access
        self._rates = Rates(limits.rate, limits.concurrency, limits.tokens)
        self._threads = ThreadPoolExecutor(4, "owl-sap-tool")

    def close(self) -> None:
        """End without waiting for running calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def principal(self, request: Any) -> Principal:
        """Return the caller. Raises Refused."""
        if self._key is None:
            return OPERATOR
        try:
            principal = await self._access.principal(self._key)
        except Unauthenticated as error:
            raise Refused(f"the key of owl-sap mcp (mcp.key) is refused: {error}") from None
        if not principal.may("search"):
            raise Refused("the key of owl-sap mcp (mcp.key) needs the scope search, which it does not have")
        return principal

    async def run(self, call: Callable[[], Answer], request: Any) -> Answer:
        principal = await self.principal(request)
        self._rates.enter(principal)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        finally:
            self._rates.leave(principal)


Cancelling = Callable[[Callable[[], object]], AbstractContextManager[None]]


def serve(service: Service, cancelling: Cancelling) -> None:
    """Serve until stdin ends. `cancelling(cancel)`: a context in which a signal calls `cancel`; the signal takes effect
    when the context ends. Raises AccessUnusable for unreadable keys, and ConfigurationError for a rejected key."""

    async def serving() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        # The SDK would report an exception that a signal raises inside its task as a defect.
        with cancelling(lambda: loop.call_soon_threadsafe(task.cancel)):
            try:
                await parent.principal(None)
            except Refused as error:  # a rejected key fails the start, not the first call
                raise ConfigurationError(str(error)) from None
            # Only the REST service writes an audit log: this caller has HANA's login anyway.
            server = Agents(service, parent.principal, parent.run, lambda request, **fields: None).server
            async with stdio_server(stdin=cast("anyio.AsyncFile[str]", _lines())) as (reading, writing):
                await server.run(reading, writing, server.create_initialization_options())

    service.access.open()
    with closing(Parent(service)) as parent:
        asyncio.run(serving())


async def _lines() -> AsyncIterator[str]:
    """Yield the lines of stdin. The SDK's own reader waits in a thread that cannot be cancelled, which would delay
    SIGTERM until the next line."""
    loop, come = asyncio.get_running_loop(), asyncio.Queue[bytes](4)  # bounded, so that a fast sender waits

    def read() -> None:
        # Not sys.stdin: the daemon thread would still hold its lock when the interpreter ends.
        data = b"-"
        while data:
            try:
                data = os.read(0, 65_536)
            except OSError:
                data = b""
            putting = come.put(data)
            try:
                asyncio.run_coroutine_threadsafe(putting, loop).result()
            except (RuntimeError, CancelledError):  # the loop has ended
                putting.close()
                return

    threading.Thread(target=read, name="owl-sap-stdin", daemon=True).start()
    rest = b""
    while data := await come.get():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            if line.strip():
                yield line.decode(errors="replace")
        if len(rest) > 16 << 20:  # bytes of one message
            return
    if rest.strip():
        yield rest.decode(errors="replace")

"""How long a request may take: its body to come, and its answer to begin; and how large its head may be. Plain ASGI.
What comes before a request is whole is the business of `connections`.
"""

from __future__ import annotations

import asyncio
from asyncio import timeouts

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.src.api.errors import HEAD_TOO_LARGE, TOO_SLOW, UNAVAILABLE, problem

MOST_HEAD_BYTES = 64 * 1024
"""Of path and headers together: room for a token with many claims."""
CLOSE = {"Connection": "close"}
"""Whoever has not sent all of a request is not read from any more."""


class Ending:
    """The requests whose answer has not begun, and by when they must end once the process is to."""

    def __init__(self) -> None:
        self._open: set[timeouts.Timeout] = set()
        self._by: float | None = None

    @property
    def begun(self) -> bool:
        return self._by is not None

    def within(self, seconds: float) -> None:
        """From now on, on the event loop."""
        self._by = asyncio.get_running_loop().time() + seconds
        for until in self._open:
            self._shorten(until)

    def add(self, until: timeouts.Timeout) -> None:
        self._open.add(until)
        self._shorten(until)

    def remove(self, until: timeouts.Timeout) -> None:
        self._open.discard(until)

    def _shorten(self, until: timeouts.Timeout) -> None:
        when = until.when()
        if self._by is not None and when is not None and when > self._by:
            until.reschedule(self._by)


class Deadlines:
    """408 for a body that does not come, 503 for an answer that does not begin, 431 for a head that is too large. A
    stream that has begun may last."""

    def __init__(self, app: ASGIApp, timeout: float, read_timeout: float, ending: Ending) -> None:
        """In seconds."""
        self._app = app
        self._timeout = timeout
        self._read_timeout = read_timeout
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _head_bytes(scope) > MOST_HEAD_BYTES:
            why = f"path and headers are larger than {MOST_HEAD_BYTES} bytes"
            await problem(Request(scope), HEAD_TOO_LARGE, why, headers=CLOSE)(scope, receive, send)
            return
        until = asyncio.timeout(self._timeout)
        try:
            async with until:
                self._ending.add(until)
                try:
                    await self._app(scope, self._receiving(receive), _sending(until, send))
                finally:
                    self._ending.remove(until)
        except TimeoutError:
            if not until.expired():
                raise
            await problem(Request(scope), UNAVAILABLE, self._why(), headers=CLOSE)(scope, receive, send)

    def _why(self) -> str:
        if self._ending.begun:
            return "the service is ending and has given this request up: try again later, or elsewhere"
        return f"nothing to answer with was found within {self._timeout:g} s (setting api.timeout): try again later"

    def _receiving(self, receive: Receive) -> Receive:
        """As `receive`, until the body has come in time; whoever watches for the client to leave may wait for ever."""
        due = asyncio.get_running_loop().time() + self._read_timeout
        whole = False

        async def receiving() -> Message:
            nonlocal whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(due):
                    message = await receive()
            except TimeoutError:
                why = f"the body has not come within {self._read_timeout:g} s (setting api.read_timeout)"
                raise HTTPException(TOO_SLOW, why, CLOSE) from None
            whole = not message.get("more_body", False)
            return message

        return receiving


def _sending(until: timeouts.Timeout, send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start" and not until.expired():
            until.reschedule(None)
        await send(message)

    return sending


def _head_bytes(scope: Scope) -> int:
    head = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    return head + sum(len(name) + len(value) for name, value in scope["headers"])

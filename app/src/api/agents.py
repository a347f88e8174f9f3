"""The route of the Model Context Protocol, behind the same guard, limits and threads as the others."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from app.src.access.principal import Principal
from app.src.access.rates import RateExceeded
from app.src.api import guard
from app.src.api.bodies import content_of, once_more
from app.src.api.errors import ACCEPTED, BAD_REQUEST, FORBIDDEN, OK, NotFound, Refused, problem
from app.src.api.executors import Executors, Json
from app.src.api.guard import caller
from app.src.api.middleware import audit
from connector.errors import ConfigurationError
from connector.extras import install_command

if TYPE_CHECKING:
    from app.src.mcp.http import Streamable

Result = TypeVar("Result")
PATH = "/mcp"
_OFF = "tools for agents are not served here (setting mcp.http)"
_CALL = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/call",
    "params": {"name": "search", "arguments": {"collection": "materials", "query": "noise from the gearbox"}},
}
_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"type": "object"}, "example": _CALL}},
    }
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    OK: {
        "description": "The JSON-RPC answer; what a tool refused is one too, with `isError`.",
        "content": {"application/json": {"schema": {"type": "object"}}},
    },
    ACCEPTED: {"description": "A notification was taken."},
}


class Caller:
    """The caller of a tool."""

    expected: tuple[type[Exception], ...] = (Refused, RateExceeded)

    def __init__(self, executors: Executors) -> None:
        self._desk = executors

    async def principal(self, request: Request) -> Principal:
        return caller(request)

    async def run(self, call: Callable[[], Result], principal: Principal, request: Request) -> Result:
        return await self._desk.run(call, request)

    def tell(self, request: Request, **fields: Any) -> None:
        audit(request.scope, **fields)


def offered(executors: Executors) -> Streamable | None:
    """Return the tools, or None where mcp.http is off. Raises ConfigurationError where the SDK is not installed."""
    if not executors.service.settings.mcp.http:
        return None
    try:
        from app.src.mcp.http import Streamable
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types"):
            raise
        raise ConfigurationError(
            f"mcp.http is on, and the package mcp is not installed: {install_command('mcp')}"
        ) from None
    return Streamable(executors.service, Caller(executors))


@contextlib.asynccontextmanager
async def running(agents: Streamable | None) -> AsyncIterator[None]:
    if agents is None:
        yield
        return
    async with agents.running():
        yield


def add(routes: APIRouter, agents: Streamable | None) -> None:
    class Route(APIRoute):
        """Reads the body within the bounds of every body, then calls the SDK."""

        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["method"] not in (self.methods or ()):
                await super().handle(scope, receive, send)
            else:
                await _answer(agents, scope, receive, send)

    async def agents_tools() -> Response:
        """Tools for agents over the Model Context Protocol: streamable HTTP without sessions, answers in JSON. Only
        where the setting mcp.http is on."""
        raise AssertionError("the route answers by itself")

    options: dict[str, Any] = {"responses": _ANSWERS, "openapi_extra": _BODY, "response_class": Response}
    options |= {"summary": "Call tools over the Model Context Protocol", "tags": ["MCP"]}
    routes.add_api_route(PATH, agents_tools, methods=["POST"], route_class_override=Route, **options)


async def _answer(agents: Streamable | None, scope: Scope, receive: Receive, send: Send) -> None:
    """Raises NotFound where mcp.http is off, and ClientLeft."""
    if agents is None:
        raise NotFound(_OFF)
    if guard.foreign(scope):
        scope[guard.REFUSED] = "origin"
        await problem(Request(scope), FORBIDDEN, guard.FOREIGN)(scope, receive, send)
        return
    body = await content_of(receive)
    wrong = agents.fault(body)
    if wrong is not None:
        await Json(wrong, BAD_REQUEST)(scope, receive, send)
        return
    await agents(scope, once_more(body, receive), send)

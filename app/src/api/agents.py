"""The Model Context Protocol route, which shares the guard, limits and threads of the other routes."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from app.src.access.principal import Principal
from app.src.api.errors import Refused, problem
from app.src.api.guard import FOREIGN, REFUSED, audit, caller, foreign, once_more
from app.src.api.requests import Executors, Json

_CALL = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/call",
    "params": {"name": "search", "arguments": {"collection": "materials", "query": "noise from the gearbox"}},
}
_BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}, "example": _CALL}}}
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The JSON-RPC response. A tool's refusal is also one, with `isError`.",
        "content": {"application/json": {"schema": {"type": "object"}}},
    },
    202: {"description": "The notification was accepted."},
}


def add(routes: APIRouter, executors: Executors) -> AbstractAsyncContextManager[None]:
    """Add the route; return a context in which it works. Raises ModuleNotFoundError if the SDK is not installed."""
    manager: Any = None
    if executors.service.settings.mcp.http:
        from app.src.mcp.server import Agents, fault_of, streamable

        async def principal(request: Request) -> Principal:
            return caller(request)

        tools = Agents(executors.service, principal, executors.run, audit, (Refused,))
        manager = streamable(tools, executors.limits.max_body_bytes)

    class _Answer(Response):
        """A response that the SDK writes."""

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await manager.handle_request(scope, once_more(bytes(self.body), receive), send)

    @routes.post(
        "/mcp",
        summary="Call tools over the Model Context Protocol",
        tags=["MCP"],
        response_class=Response,
        responses=_ANSWERS,
        openapi_extra=_BODY,
    )
    async def agents_tools(request: Request) -> Response:
        """Call tools over the Model Context Protocol: streamable HTTP without sessions, responses in JSON. Available
        only if the setting mcp.http is on."""
        if manager is None:
            raise Refused("NotFound", "this service does not offer MCP tools; the setting mcp.http turns them on")
        if foreign(request.headers):
            request.scope[REFUSED] = "origin"
            return problem(request, 403, FOREIGN)
        body = await request.body()
        wrong = fault_of(body)
        return _Answer(body) if wrong is None else Json(wrong, 400)

    return nullcontext() if manager is None else manager.run()

"""Tools over streamable HTTP: each request is answered by itself, in JSON. There are no sessions that could be stolen
and no streams that would outlast a deadline. Plain ASGI; who asks is the guard's business, and nobody comes past it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import mcp_types as types
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from pydantic import ValidationError
from pydantic_core import from_json

from app.src.mcp.server import Agents, Front
from app.src.service.service import Service

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Streamable:
    """`running` is to be entered once, while requests are served."""

    def __init__(self, service: Service, front: Front) -> None:
        largest = service.settings.api.max_body_bytes  # looked at before, and the SDK has a bound of its own
        self._manager = StreamableHTTPSessionManager(
            Agents(service, front).server, stateless=True, json_response=True, max_request_body_size=largest
        )

    def running(self) -> AbstractAsyncContextManager[None]:
        return self._manager.run()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._manager.handle_request(scope, receive, send)

    def fault(self, body: bytes) -> dict[str, Any] | None:
        """What is wrong with a body that is no message, as JSON-RPC has it. The SDK's own answer would repeat it."""
        try:
            message = from_json(body)
        except ValueError:
            return _error(types.PARSE_ERROR, "the body is not JSON")
        try:
            types.jsonrpc_message_adapter.validate_python(message, by_name=False)
        except ValidationError:
            return _error(types.INVALID_REQUEST, "the body is not one JSON-RPC request or notification")
        return None


def _error(code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}

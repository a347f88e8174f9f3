"""Tools over streamable HTTP as a plain ASGI application. Each request is answered alone, in JSON: no sessions to
steal, no streams that outlast a deadline. The guard authenticates callers."""

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
    """Enter `running` once, while requests are served."""

    def __init__(self, service: Service, front: Front) -> None:
        largest = service.settings.api.max_body_bytes  # checked by the guard too; the SDK has a limit of its own
        self._manager = StreamableHTTPSessionManager(
            Agents(service, front).server, stateless=True, json_response=True, max_request_body_size=largest
        )

    def running(self) -> AbstractAsyncContextManager[None]:
        return self._manager.run()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._manager.handle_request(scope, receive, send)

    def fault(self, body: bytes) -> dict[str, Any] | None:
        """Return the JSON-RPC error of an invalid body, or None. The SDK's own answer would repeat the body."""
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

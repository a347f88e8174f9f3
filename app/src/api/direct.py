"""Routes that read their body by themselves: all do, so that none parses more than it may hold; and those without
ceremony, for the requests that come by the thousand: the body is checked in one go, and no dependencies are resolved.
What is not as it should be goes FastAPI's ordinary way, and gets the refusal it gives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.types import Message, Receive, Scope, Send

from app.src.api.bounded import check_values
from app.src.api.errors import ClientLeft

Endpoint = Callable[..., Coroutine[Any, Any, Response]]
Kept = TypeVar("Kept", bound=Endpoint)
_JSON = b"application/json"


class BoundedRoute(APIRoute):
    """FastAPI's ordinary way, with a body of bounded content."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.body_field is None or scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        content = await content_of(receive)
        await super().handle(scope, once_more(content, receive), send)


class DirectRoute(APIRoute):
    """For an endpoint `(request: Request, body: SomeModel, **path_parameters: str) -> Response`, whose signature
    describes the route in OpenAPI as that of any other does."""

    def __init__(self, path: str, endpoint: Endpoint, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if self.dependencies:  # of the route, of its router or of the application: nobody would resolve them
            raise TypeError(f"{path} is a DirectRoute, which resolves no dependencies; check in a middleware")
        self._called = endpoint
        self._model: type[BaseModel] = inspect.signature(endpoint, eval_str=True).parameters["body"].annotation

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        content = await content_of(receive)
        body = self._checked(scope, content)
        if body is None:
            await super().handle(scope, once_more(content, receive), send)
            return
        response = await self._called(request=Request(scope, receive), body=body, **scope["path_params"])
        await response(scope, receive, send)

    def _checked(self, scope: Scope, content: bytes) -> BaseModel | None:
        """None for what is no JSON, is not said to be, or does not fit."""
        if not _is_json(scope):
            return None
        try:
            # Takes no JSON that the standard library's parser, which FastAPI uses, refuses or reads otherwise.
            return self._model.model_validate(from_json(content))
        except (ValueError, ValidationError):
            return None


def direct(routes: APIRouter, path: str, **options: Any) -> Callable[[Kept], Kept]:
    """Register an endpoint as a DirectRoute for POST."""

    def register(endpoint: Kept) -> Kept:
        routes.add_api_route(path, endpoint, methods=["POST"], route_class_override=DirectRoute, **options)
        return endpoint

    return register


def _is_json(scope: Scope) -> bool:
    for name, value in scope["headers"]:
        if name == b"content-type":
            return bool(value.partition(b";")[0].strip().lower() == _JSON)
    return False


async def content_of(receive: Receive) -> bytes:
    """Return the whole body. Raises ClientLeft when the rest never comes, and TooMuch for too many JSON values."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft("the connection was closed before the whole body had come")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            content = parts[0] if len(parts) == 1 else b"".join(parts)
            check_values(content)
            return content


def once_more(content: bytes, receive: Receive) -> Receive:
    """What has been read, and then what comes."""
    unread = [content]

    async def again() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return again

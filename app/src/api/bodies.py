"""JSON bodies within bounds: how many values they may hold, the base of their models, and the routes that read them.

pydantic reports each element that does not fit. Two megabytes hold hundreds of thousands, and describing them all would
stop the event loop for seconds, so lists are checked in slices and only the first faults are reported.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Coroutine, Mapping
from itertools import islice
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import from_json
from starlette.types import Message, Receive, Scope, Send

from app.src.api.errors import MOST_FAULTS, ClientLeft, TooMuch

MOST_VALUES = 100_000  # JSON values in a body, at any depth
MOST_ITEMS = 65_536  # of one list; HANA's vectors have up to 65,000 numbers
# Also matches a text without an end, so that no start of a text is visited twice.
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def check_values(body: bytes) -> None:
    """Raise TooMuch for a body of more than MOST_VALUES values. It does not parse: two megabytes take 2 to 20 ms."""
    encoding = json.detect_encoding(body)
    if not encoding.startswith("utf-8"):  # the parser reads the others too
        body = body.decode(encoding, "replace").encode()
    if _beginnings(body) <= MOST_VALUES:
        return
    bare, texts = _TEXT.subn(b"", body, count=2 * MOST_VALUES)  # a value has at most one name
    if texts == 2 * MOST_VALUES or _beginnings(bare) > MOST_VALUES:
        raise TooMuch(
            f"the body holds more than {MOST_VALUES} JSON values: send several requests with fewer texts, numbers or "
            "members each"
        )


def _beginnings(body: bytes) -> int:
    """Return the number of values, or more where texts hold these characters."""
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def few_faults(most: int) -> WrapValidator:
    """Return a validator for a list of at most `most` items that reports only the first slice with faults."""

    def checked(items: Any, check: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(items, list) or len(items) <= MOST_FAULTS:
            return check(items)
        good: list[Any] = []
        for start in range(0, len(items), MOST_FAULTS):
            end = start + MOST_FAULTS
            try:
                good += check(items[start:end])
            except ValidationError:
                return check(items[:end])  # with the right positions
        return good if len(items) <= most else check(items)

    return WrapValidator(checked)


FEW_FAULTS = few_faults(MOST_ITEMS)
Texts = Annotated[list[str], Field(max_length=MOST_ITEMS), FEW_FAULTS, Tag("list[str]")]
Numbers = Annotated[list[int], Field(max_length=MOST_ITEMS), FEW_FAULTS, Tag("list[int]")]
ListsOfNumbers = Annotated[list[Numbers], Field(max_length=MOST_ITEMS), FEW_FAULTS, Tag("list[list[int]]")]


def few_unknown(given: Any, known: Mapping[str, Any]) -> Any:
    """Drop most members that are not `known` from an object; the others are still rejected."""
    if not isinstance(given, dict) or len(given) <= MOST_FAULTS:
        return given
    unknown = islice((name for name in given if name not in known), MOST_FAULTS)
    return {name: given[name] for name in known if name in given} | dict.fromkeys(unknown)


class Body(BaseModel):
    """A request body. Strict: a number is not a string, a boolean not a number; floats are finite."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, given: Any) -> Any:
        return few_unknown(given, cls.model_fields)


# JSON Schema of a member that is present and not null.
_GIVEN: dict[str, dict[str, Any]] = {
    "query": {"type": "string"},
    "vector": {"type": "array"},
    "like": {"type": "string"},
    "keys": {"type": "array"},
    "all": {"const": True},
}


def _says(given: str) -> dict[str, Any]:
    return {"required": [given], "properties": {given: _GIVEN[given]}}


def one_of_members(*given: str) -> ConfigDict:
    """Describe in OpenAPI that exactly one of these members must be given."""
    return ConfigDict(json_schema_extra={"oneOf": [_says(each) for each in given]})


Endpoint = Callable[..., Coroutine[Any, Any, Response]]
Kept = TypeVar("Kept", bound=Endpoint)
_JSON = b"application/json"


class BoundedRoute(APIRoute):
    """FastAPI's own route, with a bounded body."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.body_field is None or scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        content = await content_of(receive)
        await super().handle(scope, once_more(content, receive), send)


class DirectRoute(APIRoute):
    """A fast route for an endpoint `(request: Request, body: SomeModel, **path_parameters: str) -> Response`. It checks
    the body in one go and resolves no dependencies. A body that does not fit takes FastAPI's way to its error."""

    def __init__(self, path: str, endpoint: Endpoint, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if self.dependencies:  # of the route, its router or the application
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
        """Return the model, or None for a body that is not JSON, has no JSON content type, or does not fit."""
        if not _is_json(scope):
            return None
        try:
            # Accepts only JSON that the standard library's parser, which FastAPI uses, reads the same.
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
    """Return the whole body. Raises ClientLeft if the client leaves before its end, TooMuch for too many values."""
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
    """Return a `receive` that gives `content` again, then what follows."""
    unread = [content]

    async def again() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return again

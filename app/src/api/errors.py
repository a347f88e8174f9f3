"""Errors to HTTP: the table from class to status, RFC 9457 problem documents, and OpenAI's error shape under the paths
that its clients call. The only module with HTTP statuses. Never shows the message of an unexpected error.
"""

from __future__ import annotations

import difflib
import http
import inspect
import logging
import math
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from app.src.access.rates import RateExceeded
from app.src.access.rows import RowsRefused
from app.src.core import backends, queue
from app.src.jobs import JobOver, JobRunning, QueueFull, StateUnusable, UnknownJob
from app.src.service.catalog import NotPreviewable
from app.src.service.explaining import code_of, explained
from app.src.service.service import Service
from connector import errors


class ProblemBody(BaseModel):
    """RFC 9457, as every error is answered."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "type": "about:blank",
                "title": "Not Found",
                "status": 404,
                "detail": 'there is no collection "material"; did you mean "materials"?',
                "code": "OWL-1004",
                "instance": "/v1/collections/material",
                "request_id": "9b1f0c5e6f0a4e0d8a55b1a0f7a0c3c1",
            }
        }
    )

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str = Field(description="the same for every error of this kind, for good: `owl-sap explain CODE`")
    instance: str
    request_id: str


PROBLEM = "application/problem+json"
OPENAI_PATHS = ("/v1/embeddings", "/v1/models")
RETRY_AFTER = "5"  # seconds, where no better estimate is known
OK = 200
ACCEPTED = 202
NO_CONTENT = 204
NOT_MODIFIED = 304
CRASHED = 500
CLIENT_LEFT = 499  # as nginx logs it; not a standard status
BAD_REQUEST = 400
UNAUTHORIZED = 401
FORBIDDEN = 403
NOT_FOUND = 404
NOT_ALLOWED = 405
TOO_SLOW = 408
TOO_LARGE = 413
MISDIRECTED = 421
HEAD_TOO_LARGE = 431
TOO_MANY = 429
UNAVAILABLE = 503
# A caller may invent any number of others.
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
MOST_FAULTS = 50  # reported per request: a body of two megabytes may contain a quarter of a million
_EXTRA = "extra_forbidden"
_LONGEST_MEMBER = 100  # characters of an unknown member's name that are compared with those that there are
_log = logging.getLogger(__name__)


class Refused(Exception):
    """A request that cannot be fulfilled; the message says why. `param` names the faulty part of the body and `code` is
    a word for machines: OpenAI's error shape has both."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Unprocessable(Refused):
    """Well-formed, but invalid."""


class TooMuch(Refused):
    """Above a limit; the message names it."""


class BadRequest(Refused):
    """A fault for which OpenAI's own service answers 400."""


class UnknownModel(Refused):
    """The request names another model than the served one."""


class NotFound(Refused):
    """The path names something unknown; the message has the nearest names."""


class TooManyStreams(Refused):
    """The limit of clients that follow jobs is reached."""


class Crowded(Refused):
    """The request would wait too long for a thread. `seconds`: how long the first of the waiting has waited."""

    def __init__(self, message: str, *, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class ClientLeft(Refused):
    """The client has left, so the answer is dropped; only the count of requests shows it."""


STATUS: tuple[tuple[type[Exception], int], ...] = (
    # The first match counts, so specific classes come before general ones.
    (Unprocessable, 422),
    (TooMuch, TOO_LARGE),
    (BadRequest, 400),
    (UnknownModel, 404),
    (NotFound, 404),
    (UnknownJob, 404),
    (JobRunning, 409),
    (JobOver, 409),
    (QueueFull, TOO_MANY),
    (RateExceeded, TOO_MANY),
    (TooManyStreams, TOO_MANY),
    (Crowded, TOO_MANY),
    (ClientLeft, CLIENT_LEFT),
    (RowsRefused, FORBIDDEN),
    (StateUnusable, UNAVAILABLE),
    (errors.UnknownCollection, 404),
    (errors.UnknownKey, 404),
    (errors.UnknownRow, 404),
    (errors.UnknownGeneration, 404),
    (errors.ModelMismatch, 409),
    (errors.BadFilter, 422),
    (errors.BadDocument, 422),
    (errors.WrongOrigin, 409),
    (errors.TextsNotEmbeddable, 422),
    (NotPreviewable, 422),
    (errors.ConfigurationError, CRASHED),
    (errors.DatabaseError, UNAVAILABLE),
    (errors.LeaseLost, 409),
    (errors.GenerationRefused, 409),
    (errors.GenerationChanged, UNAVAILABLE),
    (errors.SyncPaused, 409),
    (errors.ConnectorError, CRASHED),
    (backends.NonFinite, 422),
    (queue.EngineOverloaded, TOO_MANY),
    (queue.WorkerDied, UNAVAILABLE),
    (backends.OutOfMemory, UNAVAILABLE),
    (backends.EngineClosed, UNAVAILABLE),
    (backends.EngineError, CRASHED),
)
# Names of refusals that have no exception class.
_WITHOUT_ERROR = {
    400: "BadRequest",
    UNAUTHORIZED: "Unauthenticated",
    FORBIDDEN: "Forbidden",
    NOT_FOUND: "NotFound",
    NOT_ALLOWED: "MethodNotAllowed",
    TOO_SLOW: "TooSlow",
    TOO_LARGE: "TooMuch",
    MISDIRECTED: "Misdirected",
    422: "Unprocessable",
    TOO_MANY: "Crowded",
    HEAD_TOO_LARGE: "HeadTooLarge",
    CRASHED: "Exception",
    UNAVAILABLE: "NotNow",
}
WHY_CRASHED = "unexpected error; the log of the service has it under this request id"


def status_of(error: Exception) -> int:
    return next((status for kind, status in STATUS if isinstance(error, kind)), CRASHED)


def retry_after(error: Exception) -> str | None:
    """Return the measured Retry-After in whole seconds, or None."""
    tells = queue.EngineOverloaded | Crowded | QueueFull | RateExceeded
    measured = error.seconds if isinstance(error, tells) else None
    return None if measured is None else str(max(1, math.ceil(measured)))


def problem(
    request: Request,
    status: int,
    detail: str,
    *,
    blame: Refused | None = None,
    headers: Mapping[str, str] | None = None,
    error: Exception | None = None,
    **more: Any,
) -> JSONResponse:
    """Return a problem document (RFC 9457) with `more` members; under OPENAI_PATHS OpenAI's shape, with the parts of
    `blame`. The code is that of `error`, else that of the status."""
    headers = dict(headers or {})
    if status in (TOO_MANY, UNAVAILABLE):
        headers.setdefault("Retry-After", RETRY_AFTER)
    if request.url.path.startswith(OPENAI_PATHS):
        return JSONResponse(_openai(status, detail, blame), status, headers)
    request_id = request.scope.get("owl_sap.request_id", "")
    document = {
        "type": "about:blank",
        "title": "Client Closed Request" if status == CLIENT_LEFT else http.HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "code": code_for(status, error),
        "instance": request.url.path,
        "request_id": request_id,
    } | more
    return JSONResponse(document, status, headers, media_type=PROBLEM)


def code_for(status: int, error: Exception | None = None) -> str:
    """Return the code for `owl-sap explain`."""
    return code_of(error) if error is not None else explained()[_WITHOUT_ERROR.get(status, "BadRequest")].code


def refusal(request: Request, error: Exception) -> JSONResponse:
    """Return the answer for an error of the table."""
    blame = error if isinstance(error, Refused) else None
    answer = problem(request, status_of(error), str(error), blame=blame, error=error)
    if (seconds := retry_after(error)) is not None:
        answer.headers["Retry-After"] = seconds
    return answer


def _openai(status: int, detail: str, blame: Refused | None) -> dict[str, Any]:
    """Types as OpenAI's API reference lists them; its clients choose their exception by the status alone."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = "server_error" if status >= CRASHED else kinds.get(status, "invalid_request_error")
    param, code = (blame.param, blame.code) if blame else (None, None)
    return {"error": {"message": detail, "type": kind, "param": param, "code": code}}


def install(app: FastAPI, service: Service) -> None:
    """Answer every error of the product, of validation and of routing with a problem document."""

    async def ours(request: Request, error: Exception) -> JSONResponse:
        service.metrics.count_error(error)
        return refusal(request, error)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        found = cast("RequestValidationError", error).errors()
        shown = found[:MOST_FAULTS]
        members = _members(request) if any(fault["type"] == _EXTRA for fault in shown) else []
        faults = [{"where": _where(fault["loc"]), "what": _unknown(fault, members) or _what(fault)} for fault in shown]
        detail = "; ".join(f"{fault['where']}: {fault['what']}" for fault in faults[:5])
        if "json" not in request.headers.get("content-type", "") and request.headers.get("content-length", "0") != "0":
            detail += "; send the header Content-Type: application/json"
        blame = Refused(detail, param=_param(found))
        return problem(request, 422, detail, blame=blame, errors=faults)

    async def routing(request: Request, error: Exception) -> JSONResponse:
        refusal = cast("HTTPException", error)
        answer = problem(request, refusal.status_code, str(refusal.detail))
        answer.headers.update(refusal.headers or {})
        if refusal.status_code == NOT_ALLOWED:
            answer.headers["Allow"] = ", ".join(_allowed(request))
        return answer

    for kind, _ in STATUS:
        app.add_exception_handler(kind, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, routing)
    for kind in service.parts.expected_errors:
        app.add_exception_handler(kind, ours)


def _allowed(request: Request) -> list[str]:
    """Return the methods of all routes of this path; the framework names only those of the first."""
    routes = (route for route in request.app.routes if isinstance(route, Route))
    fitting = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in fitting for method in route.methods or ()})


def log_without_text(error: Exception, request_id: str) -> None:
    """Log the class and traceback of an error; its text may hold row data."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("request %s failed: %s\n%s", request_id, type(error).__name__, frames)


def _param(faults: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the body's field of the first fault."""
    location: Sequence[Any] = faults[0]["loc"] if faults else ()
    return str(location[1]) if len(location) > 1 and location[0] == "body" else None


def _what(fault: Mapping[str, Any]) -> str:
    """Return the message without pydantic's prefix; for invalid JSON with the reason from `ctx`."""
    message, context = str(fault["msg"]), fault.get("ctx") or {}
    if fault["type"] == "json_invalid":
        return f"{message}: {context.get('error', 'not valid JSON')}"
    return message.removeprefix("Value error, ")


def _unknown(fault: Mapping[str, Any], members: Sequence[str]) -> str | None:
    """Suggest the closest known member for an unknown one."""
    if fault["type"] != _EXTRA:
        return None
    told = "unknown member"
    if len(fault["loc"]) != 2 or not members:  # further in it is another model's
        return told
    near = difflib.get_close_matches(str(fault["loc"][1])[:_LONGEST_MEMBER], members, n=1)
    return f'{told}; did you mean "{near[0]}"?' if near else f"{told}; known members: {', '.join(members)}"


def _members(request: Request) -> list[str]:
    """Return the members of the endpoint's body, by convention its parameter `body`."""
    endpoint = getattr(request.scope.get("route"), "endpoint", None)
    body = None if endpoint is None else inspect.signature(endpoint, eval_str=True).parameters.get("body")
    if body is None:
        return []
    models = get_args(body.annotation) or (body.annotation,)
    return [name for model in models for name in getattr(model, "model_fields", ())]


def _where(location: tuple[Any, ...]) -> str:
    """`body.inputs[3]`"""
    shown = ""
    for part in location:
        shown += f"[{part}]" if isinstance(part, int) else f".{part}" if shown else str(part)
    return shown

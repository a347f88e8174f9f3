"""Map errors to HTTP: the status of each class, RFC 9457 problem documents, and OpenAI's error shape under the paths
that its clients call. Never shows the message of an unexpected error."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from app.src.access.rates import RateExceeded
from app.src.access.rows import RowsRefused
from app.src.core import backends, queue
from app.src.jobs.journal import JobOver, JobRunning, QueueFull, StateUnusable, UnknownJob
from app.src.service.catalog import NotPreviewable
from app.src.service.explaining import code_of, explained
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
CLIENT_LEFT = 499  # as nginx logs it; not a standard status
MOST_FAULTS = 50  # reported per request: a body of 2 MB may contain 250,000
_log = logging.getLogger(__name__)


class Refused(Exception):
    """A request that cannot be fulfilled; the message says why. `param`: the faulty field; `code`: a machine-readable
    word. OpenAI's error shape has both."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Unprocessable(Refused):
    """Well-formed, but invalid."""


class TooMuch(Refused):
    """Above a limit; the message names it."""


class BadRequest(Refused):
    """A fault for which OpenAI's service answers 400."""


class UnknownModel(Refused):
    """The request names a model that is not served."""


class NotFound(Refused):
    """The path names something unknown; the message suggests the nearest names."""


class TooManyStreams(Refused):
    """Too many clients follow jobs."""


class Crowded(Refused):
    """The request would wait too long for a thread. `seconds`: how long the first waiting request has waited."""

    def __init__(self, message: str, *, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class ClientLeft(Refused):
    """The client has left, so the answer is dropped and only counted."""


STATUS: tuple[tuple[type[Exception], int], ...] = (
    # The first match counts, so specific classes come before general ones.
    (Unprocessable, 422),
    (TooMuch, 413),
    (BadRequest, 400),
    (UnknownModel, 404),
    (NotFound, 404),
    (UnknownJob, 404),
    (JobRunning, 409),
    (JobOver, 409),
    (QueueFull, 429),
    (RateExceeded, 429),
    (TooManyStreams, 429),
    (Crowded, 429),
    (ClientLeft, CLIENT_LEFT),
    (RowsRefused, 403),
    (StateUnusable, 503),
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
    (errors.ConfigurationError, 500),
    (errors.DatabaseError, 503),
    (errors.LeaseLost, 409),
    (errors.GenerationRefused, 409),
    (errors.GenerationChanged, 503),
    (errors.SyncPaused, 409),
    (errors.ConnectorError, 500),
    (backends.NonFinite, 422),
    (queue.EngineOverloaded, 429),
    (queue.WorkerDied, 503),
    (backends.OutOfMemory, 503),
    (backends.EngineClosed, 503),
    (backends.EngineError, 500),
)
# Names of errors without an exception class.
_WITHOUT_ERROR = {
    400: "BadRequest",
    401: "Unauthenticated",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    408: "TooSlow",
    413: "TooMuch",
    421: "Misdirected",
    422: "Unprocessable",
    429: "Crowded",
    431: "HeadTooLarge",
    500: "Exception",
    503: "NotNow",
}
WHY_CRASHED = "unexpected error; the log of the service has it under this request id"


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
    headers: Mapping[str, str] | None = None,
    error: Exception | None = None,
    **more: Any,
) -> JSONResponse:
    """Return a problem document (RFC 9457) with `more` members; under OPENAI_PATHS OpenAI's shape. Code and
    field are those of `error`, else the code is that of the status."""
    headers = dict(headers or {})
    if status in (429, 503):
        headers.setdefault("Retry-After", RETRY_AFTER)
    if request.url.path.startswith(OPENAI_PATHS):
        # Types as OpenAI's API reference lists them; its clients choose their exception by the status alone.
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else kinds.get(status)
        param, code = (error.param, error.code) if isinstance(error, Refused) else (None, None)
        fault = {"message": detail, "type": kind or "invalid_request_error", "param": param, "code": code}
        return JSONResponse({"error": fault}, status, headers)
    places = {"instance": request.url.path, "request_id": request.scope.get("owl_sap.request_id", "")}
    return JSONResponse(document(status, detail, error) | places | more, status, headers, media_type=PROBLEM)


def document(status: int, detail: str, error: Exception | None = None) -> dict[str, Any]:
    """Return the members of every problem document. `code` is for `owl-sap explain`."""
    code = code_of(error) if error is not None else explained()[_WITHOUT_ERROR.get(status, "BadRequest")].code
    title = "Client Closed Request" if status == CLIENT_LEFT else HTTPStatus(status).phrase
    return {"type": "about:blank", "title": title, "status": status, "detail": detail, "code": code}


def answer_to(request: Request, error: Exception) -> JSONResponse | None:
    """Return the answer to an error of the product or of routing; None: unexpected."""
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:  # the framework names only those of the first route
            routes = [route for route in request.app.routes if isinstance(route, Route)]
            fitting = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
            headers["Allow"] = ", ".join(sorted({method for route in fitting for method in route.methods or ()}))
        return problem(request, error.status_code, str(error.detail), headers=headers)
    status = next((status for kind, status in STATUS if isinstance(error, kind)), None)
    if status is None:
        return None
    seconds = retry_after(error)
    return problem(
        request, status, str(error), headers={} if seconds is None else {"Retry-After": seconds}, error=error
    )


def install(app: FastAPI) -> None:
    """Answer validation and routing errors with a problem document instead of FastAPI's own."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        found = error.errors()
        faults = []
        for fault in found[:MOST_FAULTS]:
            where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"])
            what = str(fault["msg"]).removeprefix("Value error, ")
            if fault["type"] == "json_invalid":
                what += f": {(fault.get('ctx') or {}).get('error', 'not valid JSON')}"
            elif fault["type"] == "extra_forbidden":
                what = "unknown member"
            faults.append({"where": where.removeprefix("."), "what": what})
        detail = "; ".join(f"{fault['where']}: {fault['what']}" for fault in faults[:5])
        if "json" not in request.headers.get("content-type", "") and request.headers.get("content-length", "0") != "0":
            detail += "; send the header Content-Type: application/json"
        first: Sequence[Any] = found[0]["loc"] if found else ()
        param = str(first[1]) if len(first) > 1 and first[0] == "body" else None
        return problem(request, 422, detail, error=Unprocessable(detail, param=param), errors=faults)

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        answer = answer_to(request, error)
        assert answer is not None
        return answer


def log_without_text(error: Exception, request_id: str) -> None:
    """Log the class and traceback of an error; its text may hold row data."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("request %s failed: %s\n%s", request_id, type(error).__name__, frames)

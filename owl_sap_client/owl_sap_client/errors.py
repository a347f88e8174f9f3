"""The error tree. Messages quote the service, never a key or a text that was sent.

OwlSapError
├── NotReached            no answer: connection refused or reset, timeout, or an untrusted certificate
├── UnexpectedAnswer      an answer this service never gives: a proxy's page, another service, another version
├── JobFailed             a job ended as failed or cancelled; `job` is its record
├── WaitTimeout           a job is still running after the timeout, and goes on; also a TimeoutError
└── ProblemError          the service rejected the request, with a reason
    ├── BadRequest 400    Unauthorized 401    Forbidden 403    NotFound 404    Conflict 409
    ├── TooLarge 413      Unprocessable 422   TooMany 429
    └── ServerError 5xx
        └── Unavailable 503
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from time import time
from typing import Any

import httpx

from owl_sap_client.results import Job


class OwlSapError(Exception):
    """Base of all errors of this package, except ValueError and TypeError for wrong arguments. Can be pickled, so it
    passes through a process pool."""

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]  # not __init__


class NotReached(OwlSapError):
    """The service did not answer; `__cause__` is httpx's error."""


class UnexpectedAnswer(OwlSapError):
    pass


class JobFailed(OwlSapError):
    def __init__(self, job: Job) -> None:
        super().__init__(f"job {job.id} ({job.kind} of {job.collection}) {job.state}: {job.error or job.note or ''}")
        self.job = job


class WaitTimeout(OwlSapError, TimeoutError):
    pass


class ProblemError(OwlSapError):
    """An error answer. `code`: the stable code of this kind of error, None if the service gives none. `request_id`:
    finds the request in the service's log. `retry_after`: seconds. `errors`: `[{"where", "what"}]` for an invalid
    body."""

    def __init__(self, response: httpx.Response, document: Mapping[str, Any]) -> None:
        self.status = response.status_code
        self.detail = str(document.get("detail") or document.get("message") or response.reason_phrase)
        self.code: str | None = document.get("code")
        self.request_id: str | None = document.get("request_id") or response.headers.get("x-request-id")
        self.retry_after = retry_after(response)
        errors = document.get("errors")
        self.errors: list[dict[str, Any]] = errors if isinstance(errors, list) else []
        known = f" (request {self.request_id})" if self.request_id else ""
        super().__init__(f"{self.status}{f' {self.code}' if self.code else ''}: {self.detail}{known}")


class BadRequest(ProblemError):
    pass


class Unauthorized(ProblemError):
    pass


class Forbidden(ProblemError):
    pass


class NotFound(ProblemError):
    pass


class Conflict(ProblemError):
    pass


class TooLarge(ProblemError):
    pass


class Unprocessable(ProblemError):
    pass


class TooMany(ProblemError):
    pass


class ServerError(ProblemError):
    pass


class Unavailable(ServerError):
    pass


KINDS: Mapping[int, type[ProblemError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    422: Unprocessable,
    429: TooMany,
    503: Unavailable,
}


def refused(response: httpx.Response) -> OwlSapError:
    """Return the error for an unexpected answer: a problem document (RFC 9457) or OpenAI's shape."""
    try:
        document = response.json()
    except ValueError:
        document = None
    if isinstance(document, dict) and isinstance(document.get("error"), dict):
        document = document["error"]
    if not isinstance(document, dict):
        document = {}
    if response.status_code < 400:
        return UnexpectedAnswer(f"{response.url.host} answered {response.status_code} to {response.request.method}")
    kind = KINDS.get(response.status_code, ServerError if response.status_code >= 500 else ProblemError)
    return kind(response, document)


def retry_after(response: httpx.Response) -> float | None:
    """Return the seconds of Retry-After, also from a date (RFC 9110); None if the header is absent or invalid."""
    value = response.headers.get("retry-after", "")
    if value.isascii() and value.isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except (ValueError, TypeError, OverflowError):
        return None

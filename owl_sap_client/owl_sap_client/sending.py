"""Connection settings, retry rules and results of calls, shared by both clients. Never sleeps itself."""

from __future__ import annotations

import os
import random
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypedDict, TypeVar

import httpx

from owl_sap_client.errors import JobFailed, NotReached, WaitTimeout, refused, retry_after
from owl_sap_client.operations import Call
from owl_sap_client.results import Job

T = TypeVar("T")
KEY_VARIABLE = "OWL_SAP_API_KEY"
Outcome = httpx.Response | httpx.RequestError
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout)
_BROKEN = (*_NOT_SENT, httpx.NetworkError, httpx.RemoteProtocolError)
# A read timeout is not included: the service may still be working on the request.


@dataclass(frozen=True, slots=True)
class Retries:
    """How requests are retried. `most`: retries of one request. `longest`: longest pause before a retry, in seconds;
    if the service asks for more, the error is raised at once. Retries cover 429 and 503, which the service sends before
    it does any work, and lost connections of operations that may run twice."""

    most: int = 2
    longest: float = 30.0

    def wait(self, tried: int, outcome: Outcome, *, repeatable: bool) -> float | None:
        """Return the seconds until the next retry, None for no retry. `tried`: retries so far."""
        asked = None
        if isinstance(outcome, httpx.Response):
            asked = retry_after(outcome)
            # A gateway's 503 lacks Retry-After and may come after the work has begun.
            retryable = outcome.status_code in (429, 503) and (repeatable or "retry-after" in outcome.headers)
        else:
            retryable = isinstance(outcome, _BROKEN if repeatable else _NOT_SENT)
        if tried >= self.most or not retryable:
            return None
        seconds = min(0.25 * 2**tried, 5.0) if asked is None else asked
        # Jitter, so that clients with the same pause do not retry together.
        return None if seconds > self.longest else seconds * random.uniform(1, 1.1)


def finished(call: Call[T], outcome: Outcome) -> T:
    """Return the result of a call or raise its error."""
    if isinstance(outcome, httpx.RequestError):
        raise not_reached(outcome) from outcome
    if outcome.status_code not in call.good:
        raise refused(outcome)
    return call.read(outcome)


def not_reached(error: httpx.RequestError) -> NotReached:
    return NotReached(f"{error.request.url.host} did not answer: {str(error) or type(error).__name__}")


class Connection(TypedDict, total=False):
    """Options of a client. `timeout`: seconds for each of connecting, sending and receiving, or an httpx.Timeout.
    `retries`: see Retries. `tls`: False trusts any certificate, a path names a file of authorities, an ssl.SSLContext
    covers the rest (client certificates). `transport`: replaces httpx's. `user_agent`: prepended to ours."""

    timeout: float | httpx.Timeout
    retries: Retries
    tls: bool | str | ssl.SSLContext
    transport: Any
    user_agent: str


def http_options(url: str, key: str | None, connection: Connection) -> dict[str, Any]:
    """Return the arguments of httpx.Client and httpx.AsyncClient. Raises ValueError for an invalid address or key,
    without quoting it, and TypeError for an unknown option: a misspelt `key` would send requests without one."""
    if unknown := sorted(set(connection) - set(Connection.__annotations__)):
        known = ", ".join(Connection.__annotations__)
        raise TypeError(f"unknown option {', '.join(unknown)}; a client takes url, key, {known}")
    address = httpx.URL(url)
    if address.scheme not in ("http", "https") or not address.host:
        raise ValueError("the address must begin with http:// or https:// and name a host")
    if address.userinfo:
        raise ValueError("the address contains a user or password; pass the key as the argument `key` instead")
    tls = connection.get("tls", True)
    return {
        "base_url": address,
        "headers": _headers(key, connection.get("user_agent")),
        "timeout": connection.get("timeout", 60.0),
        "verify": ssl.create_default_context(cafile=tls) if isinstance(tls, str) else tls,
        "transport": connection.get("transport"),
    }


def _headers(key: str | None, user_agent: str | None) -> dict[str, str]:
    key = os.environ.get(KEY_VARIABLE) if key is None else key
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        raise ValueError("the key contains spaces or characters that are not allowed in a header")
    ours = f"owl-sap-client/{_version()} python-httpx/{httpx.__version__}"
    headers = {"User-Agent": ours if user_agent is None else f"{user_agent} {ours}"}
    return headers | {"Authorization": f"Bearer {key}"} if key else headers


def _version() -> str:
    try:
        return version("owl-sap-client")
    except PackageNotFoundError:  # running from a checkout
        return "0"


def pauses(job: str, timeout: float | None) -> Iterator[float]:
    """Yield the seconds between two polls of a job, growing to 2. Raises WaitTimeout after `timeout` seconds."""
    pause, end = 0.05, None if timeout is None else time.monotonic() + timeout
    while True:
        left = pause if end is None else end - time.monotonic()
        if left <= 0:
            raise WaitTimeout(f"job {job} is still running after {timeout:g} s")
        yield min(pause, left)
        pause = min(2.0, pause * 1.5)


def ended(job: Job) -> Job:
    """Return the job if it succeeded, else raise JobFailed."""
    if job.state != "succeeded":
        raise JobFailed(job)
    return job

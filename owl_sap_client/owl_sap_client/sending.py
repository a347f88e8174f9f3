"""What both clients share about sending: the settings of the connection, when a request is worth another try, and what
becomes of an answer. Waits for nothing itself."""

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
"""A read that timed out is not among them: the service may be at it still, and would do it twice."""


@dataclass(frozen=True, slots=True)
class Retries:
    """`most`: further tries of one request. `longest`: seconds to wait before one of them; where the service asks for
    more, the error is raised at once. What the service refuses with 429 or 503 it has not done, so it is tried again;
    after a lost connection only what may be done twice."""

    most: int = 2
    longest: float = 30.0

    def wait(self, tried: int, outcome: Outcome, *, repeatable: bool) -> float | None:
        """Seconds until another try, None if there is to be none. `tried`: how often it was tried again already."""
        if tried >= self.most or not _worth_it(outcome, repeatable):
            return None
        asked = retry_after(outcome) if isinstance(outcome, httpx.Response) else None
        seconds = min(0.25 * 2**tried, 5.0) if asked is None else asked
        # Spread, for others were told the same.
        return None if seconds > self.longest else seconds * random.uniform(1, 1.1)


def _worth_it(outcome: Outcome, repeatable: bool) -> bool:
    if isinstance(outcome, httpx.Response):
        # A gateway's 503, without Retry-After, may come after the work was begun.
        return outcome.status_code in (429, 503) and (repeatable or "retry-after" in outcome.headers)
    return isinstance(outcome, _BROKEN if repeatable else _NOT_SENT)


def finished(call: Call[T], outcome: Outcome) -> T:
    """The result of a call, or its error."""
    if isinstance(outcome, httpx.RequestError):
        raise not_reached(outcome) from outcome
    if outcome.status_code not in call.good:
        raise refused(outcome)
    return call.read(outcome)


def not_reached(error: httpx.RequestError) -> NotReached:
    return NotReached(f"{error.request.url.host} gave no answer: {str(error) or type(error).__name__}")


class Connection(TypedDict, total=False):
    """`timeout`: seconds for each of connecting, sending and waiting for bytes; httpx.Timeout sets them apart.
    `retries`: see Retries. `tls`: False trusts any certificate, a path is a file of authorities, ssl.SSLContext is
    anything else, client certificates too. `transport`: in the place of httpx's. `user_agent` goes before ours."""

    timeout: float | httpx.Timeout
    retries: Retries
    tls: bool | str | ssl.SSLContext
    transport: Any
    user_agent: str


def http_options(url: str, key: str | None, connection: Connection) -> dict[str, Any]:
    """Arguments for httpx.Client and httpx.AsyncClient. Raises ValueError for what cannot be an address or a key, and
    shows neither; TypeError for what is no setting, or its typing slip would send no key or trust another."""
    if unknown := sorted(set(connection) - set(Connection.__annotations__)):
        known = ", ".join(Connection.__annotations__)
        raise TypeError(f"a client takes url, key and {known}; not {', '.join(unknown)}")
    address = httpx.URL(url)
    if address.scheme not in ("http", "https") or not address.host:
        raise ValueError("the address must begin with http:// or https:// and name a host")
    if address.userinfo:
        raise ValueError("the address holds a user or a password; give the key as the argument key instead")
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
        raise ValueError("the key holds spaces or characters that no header may hold")
    ours = f"owl-sap-client/{_version()} python-httpx/{httpx.__version__}"
    headers = {"User-Agent": ours if user_agent is None else f"{user_agent} {ours}"}
    return headers | {"Authorization": f"Bearer {key}"} if key else headers


def _version() -> str:
    try:
        return version("owl-sap-connector")
    except PackageNotFoundError:  # a checkout
        return "0"


def pauses(job: str, timeout: float | None) -> Iterator[float]:
    """Seconds between two looks at a job, longer and longer up to 2. Raises WaitTimeout after `timeout` in all."""
    pause, end = 0.05, None if timeout is None else time.monotonic() + timeout
    while True:
        left = pause if end is None else end - time.monotonic()
        if left <= 0:
            raise WaitTimeout(f"job {job} is not over after {timeout:g} s; it goes on")
        yield min(pause, left)
        pause = min(2.0, pause * 1.5)


def ended(job: Job) -> Job:
    """The job, if it ended well."""
    if job.state != "succeeded":
        raise JobFailed(job)
    return job

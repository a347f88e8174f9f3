"""Is the service, or the worker, in the next process well? For the health checks of containers, which have no curl.
The worker has no HTTP: it leaves a sign of life in a file. Knows no engine, no store and no terminal.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from app.src.observe.doctor import Fault
from app.src.settings import ApiSettings, WorkerSettings
from connector.errors import ConfigurationError

PATIENCE = 8.0
"""Seconds for the service to answer; a readiness probe may have to ask HANA."""
BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
_ANY = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # nosec B104 # asked instead; nothing listens here
_LOG = "its log says more"


def of_service(api: ApiSettings, patience: float = PATIENCE) -> str:
    """Asks /health/ready, where the settings say that `serve` listens; no key is needed for it. Raises Fault."""
    if api.port == 0:
        raise Fault("[api] port is 0: nobody knows where the service listens", "set a port")
    host = _ANY.get(api.host, api.host)
    try:
        connection = _connection(host, api.port, api.tls_certificate, patience)
    except OSError as error:
        raise Fault(f"the certificate {api.tls_certificate} cannot be read ({type(error).__name__})", _LOG) from None
    try:
        connection.request("GET", "/health/ready")
        answer = connection.getresponse()
        status, body = answer.status, answer.read(10_000)
    except (OSError, http.client.HTTPException) as error:
        why = str(error.verify_message) if isinstance(error, ssl.SSLCertVerificationError) else type(error).__name__
        raise Fault(f"the service at {host}:{api.port} does not answer ({why})", _LOG) from None
    finally:
        connection.close()
    if status != http.HTTPStatus.OK:
        raise Fault(f"the service at {host}:{api.port} is not ready ({status}{_failed(body)})", _LOG)
    return f"the service at {host}:{api.port} is ready"


def _connection(host: str, port: int, certificate: Path | None, patience: float) -> http.client.HTTPConnection:
    if certificate is None:
        return http.client.HTTPConnection(host, port, timeout=patience)
    # Exactly this certificate is believed, whoever signed it; the name in it is of the outside, not of loopback.
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return http.client.HTTPSConnection(host, port, timeout=patience, context=context)


def _failed(body: bytes) -> str:
    """Which checks failed: their names only."""
    with suppress(ValueError, AttributeError, TypeError):
        failed = [name for name, good in json.loads(body)["checks"].items() if good is False]
        return f": {', '.join(failed)}" if failed else ""
    return ""


def forget(path: Path | None) -> None:
    """Before a worker begins: what one before it left, killed, is no sign of its life. In a pod /tmp outlives the
    container, and the startup probe would be content while a model is still being loaded."""
    if path is not None:
        with suppress(OSError):
            path.unlink(missing_ok=True)


class Heartbeat:
    """The worker's sign of life: a file whose time of change is renewed while the work goes on, and which is gone when
    the worker ended in good order. Without a path it does nothing."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigurationError for a path that cannot be written."""
        self._path = path
        self._due = 0.0
        try:
            self._write()
        except OSError as error:
            raise ConfigurationError(
                f"[worker] heartbeat: {path} cannot be written ({error.strerror}): name a file in a folder that this "
                "user may write"
            ) from None

    def beat(self, well: Callable[[], bool]) -> None:
        """Renew it, when it is time and `well` says so."""
        if time.monotonic() >= self._due and well():
            with suppress(OSError):  # a full disk ages the file, and that is what its reader is to see
                self._write()

    def close(self) -> None:
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()

    def _write(self) -> None:
        if self._path is not None:
            self._path.touch(mode=0o644)
            os.utime(self._path)
        self._due = time.monotonic() + BEAT_SECONDS


def of_worker(worker: WorkerSettings, now: Callable[[], float] = time.time) -> str:
    """By the age of its heartbeat. Raises Fault."""
    path = worker.heartbeat
    if path is None:
        raise Fault("the worker leaves no sign of life", "set [worker] heartbeat (OWL_SAP_WORKER__HEARTBEAT) to a file")
    try:
        age = now() - path.stat().st_mtime
    except OSError:
        raise Fault(f"no worker is at work: {path} is not there", _LOG) from None
    if age > STALE_SECONDS:
        raise Fault(f"the worker's last sign of life is {age:.0f} s old ({path})", _LOG)
    return f"the worker was at work {max(0.0, age):.0f} s ago"

"""Health of the service or worker for container checks, without curl. A worker has no HTTP: it writes a heartbeat
file."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from app.src.observe import Fault
from app.src.settings import ApiSettings
from app.src.settings.model import WorkerSettings
from connector.errors import ConfigurationError

PATIENCE = 8.0  # seconds for the service to answer; readiness may have to ask HANA
STALE_SECONDS = 60.0
_ANY = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # nosec B104 # connected to, not bound
_LOG = "its log says more"


def of_service(api: ApiSettings, patience: float = PATIENCE) -> str:
    """Return a line that says the service is ready, from /health/ready, which needs no key. Raises Fault."""
    if api.port == 0:
        raise Fault("[api] port is 0, so the port of the service is unknown", "set a port")
    host = _ANY.get(api.host, api.host)
    place = f"the service at {host}:{api.port}"
    connection = http.client.HTTPConnection(host, api.port, timeout=patience)
    try:
        if api.tls_certificate is not None:
            # Trust only this certificate, whatever its issuer. Its name is not that of the loopback address.
            context = ssl.create_default_context(cafile=api.tls_certificate)
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            connection = http.client.HTTPSConnection(host, api.port, timeout=patience, context=context)
        connection.request("GET", "/health/ready")
        answer = connection.getresponse()
        status, body = answer.status, answer.read(10_000)
    except FileNotFoundError:
        raise Fault(f"the certificate {api.tls_certificate} cannot be read", _LOG) from None
    except (OSError, http.client.HTTPException) as error:
        why = str(error.verify_message) if isinstance(error, ssl.SSLCertVerificationError) else type(error).__name__
        raise Fault(f"{place} does not answer ({why})", _LOG) from None
    finally:
        connection.close()
    if status != http.HTTPStatus.OK:
        failed = ""
        with suppress(ValueError, AttributeError, TypeError):
            failed = ", ".join(name for name, good in json.loads(body)["checks"].items() if good is False)
        raise Fault(f"{place} is not ready ({status}{failed and f': {failed}'})", _LOG)
    return f"{place} is ready"


def of_worker(worker: WorkerSettings, now: Callable[[], float] = time.time) -> str:
    """Return a line with the age of the heartbeat. Raises Fault if it is missing or stale."""
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


def forget(path: Path | None) -> None:
    """Remove the heartbeat of a killed worker before the next starts: in a pod /tmp outlives the container."""
    if path is not None:
        with suppress(OSError):
            path.unlink(missing_ok=True)


@contextmanager
def beating(path: Path | None) -> Iterator[Callable[[], None]]:
    """Yield a function that renews the heartbeat file; without a path it does nothing. Remove the file at the end.
    Raises ConfigurationError for a path that cannot be written."""

    def beat() -> None:
        if path is not None:
            with suppress(OSError):  # on a full disk the file ages, which the health check detects
                path.touch(mode=0o644)

    try:
        if path is not None:
            path.touch(mode=0o644)
    except OSError as error:
        raise ConfigurationError(
            f"[worker] heartbeat: {path} cannot be written ({error.strerror}): name a file in a folder that this user "
            "may write"
        ) from None
    try:
        yield beat
    finally:
        forget(path)

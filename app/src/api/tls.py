"""The https certificate, reloaded when its files change."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cryptography import x509

from app.src.access.files import edition
from app.src.observe.metrics import Sample
from app.src.settings import ApiSettings
from connector.errors import ConfigurationError

_log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0  # least seconds between two checks of the files


class Certificate:
    """A certificate and key from files. `context` gives new connections the newest usable pair; open connections keep
    theirs. An unusable pair (half written, not matching) is logged once and retried, and the previous pair stays in
    use. Thread-safe."""

    def __init__(self, certificate: Path, key: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raise ConfigurationError for unreadable or unmatched files."""
        self._certificate, self._key, self._clock = certificate, key, clock
        self._lock = threading.Lock()
        self._looked = clock()
        self._seen = self._editions()
        self._newest, self._ends = _loaded_certificate(certificate, key)
        self.fault: str | None = None
        """Why the present files are unusable; None: they are served."""
        self.context = self._newest
        self.context.sni_callback = self._choose

    def look(self) -> None:
        """Load changed files. Costs two file stats; never waits for a concurrent check."""
        if self._clock() - self._looked < LOOK_SECONDS or not self._lock.acquire(blocking=False):
            return
        try:
            self._looked = self._clock()
            editions = self._editions()
            if editions != self._seen or self.fault is not None:
                self._seen = editions
                self._newest, self._ends = _loaded_certificate(self._certificate, self._key)
                self.fault = None
                _log.info("a new certificate is served: %s", self._certificate)
        except ConfigurationError as error:
            if self.fault != str(error):  # once
                _log.error("%s; the previous certificate stays in force", error)
            self.fault = str(error)
        finally:
            self._lock.release()

    def samples(self) -> list[Sample]:
        """Return the metrics: when the certificate expires, and whether the files are unusable."""
        self.look()
        return [
            ("owl_sap_tls_certificate_expiry_timestamp_seconds", (), self._ends),
            ("owl_sap_tls_certificate_refused", (), float(self.fault is not None)),
        ]

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
        """Set the context; OpenSSL calls this at each handshake."""
        self.look()
        connection.context = self._newest

    def _editions(self) -> tuple[object, object]:
        return edition(self._certificate), edition(self._key)


def certificate_of(api: ApiSettings) -> Certificate | None:
    """Return the certificate; None: http. Raises ConfigurationError."""
    if api.tls_certificate is None or api.tls_key is None:
        return None
    return Certificate(api.tls_certificate, api.tls_key)


def _loaded_certificate(certificate: Path, key: Path) -> tuple[ssl.SSLContext, float]:
    """Return the context and the certificate's expiry in POSIX seconds. Raises ConfigurationError."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.options |= ssl.OP_NO_RENEGOTIATION  # renegotiation costs the server far more than the client
    for path, setting in ((certificate, "api.tls_certificate"), (key, "api.tls_key")):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigurationError(f"{setting}: {path} cannot be read ({error.strerror})") from None
    try:
        made.load_cert_chain(certificate, key, password=_no_password)
        ends = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        raise ConfigurationError(
            f"{certificate} and {key} are not a certificate and its private key, both PEM and the key "
            "without a password (settings api.tls_certificate, api.tls_key)"
        ) from None
    return made, ends.timestamp()


def _no_password() -> str:
    """Fail; without a callback OpenSSL would prompt at the terminal."""
    raise ValueError

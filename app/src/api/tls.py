"""Encryption of the REST service: certificate and key from PEM files, TLS 1.2 or later. New ones are taken up while the
service runs. Knows no route.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cryptography import x509

from app.src.access.files import edition
from app.src.observe.scraped import Reading
from app.src.settings import ApiSettings
from connector.errors import ConfigurationError

_log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
"""Whether the files have changed is looked at no more often than that."""


class Certificate:
    """Certificate and key as the files have them: `context` gives each new connection the newest pair that can be used.
    A pair that cannot be used (half written, not belonging together) leaves the one before in force, is told of once,
    and is tried again. Open connections keep theirs. Thread-safe."""

    def __init__(self, certificate: Path, key: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigurationError for files that cannot be read, or that do not belong together."""
        self._certificate, self._key, self._clock = certificate, key, clock
        self._lock = threading.Lock()
        self._looked = clock()
        self._seen = self._editions()
        self._newest, self._ends = _loaded(certificate, key)
        self.fault: str | None = None
        """What is wrong with the files now; None: what they hold is served."""
        self.context = self._newest
        self.context.sni_callback = self._choose

    def look(self) -> None:
        """Take up what is new, if it is time to look. Costs two looks at a file, and no waiting for who looks now."""
        if self._clock() - self._looked < LOOK_SECONDS or not self._lock.acquire(blocking=False):
            return
        try:
            self._looked = self._clock()
            editions = self._editions()
            if editions != self._seen or self.fault is not None:
                self._seen = editions
                self._newest, self._ends = _loaded(self._certificate, self._key)
                self.fault = None
                _log.info("a new certificate is served: %s", self._certificate)
        except ConfigurationError as error:
            if self.fault != str(error):  # once, and not at each look
                _log.error("%s; the certificate before stays in force", error)
            self.fault = str(error)
        finally:
            self._lock.release()

    def reading(self) -> Reading:
        """For the metrics: when what is served ends, and whether what stands in the files cannot be served."""
        self.look()
        return {(): {"ends": self._ends, "refused": float(self.fault is not None)}}

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
        """OpenSSL asks at each handshake, whether or not the client names a host."""
        self.look()
        connection.context = self._newest

    def _editions(self) -> tuple[object, object]:
        return edition(self._certificate), edition(self._key)


def of(api: ApiSettings) -> Certificate | None:
    """None: http. Raises ConfigurationError for files that cannot be used."""
    if api.tls_certificate is None or api.tls_key is None:
        return None
    return Certificate(api.tls_certificate, api.tls_key)


def _loaded(certificate: Path, key: Path) -> tuple[ssl.SSLContext, float]:
    """With the time at which the certificate ends, as POSIX time. Raises ConfigurationError."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.options |= ssl.OP_NO_RENEGOTIATION  # which costs the server far more than who asks for it
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
    """Without it OpenSSL asks at the terminal."""
    raise ValueError

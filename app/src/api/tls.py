"""Encryption of the REST service: certificate and key from PEM files, TLS 1.2 or later. Knows no route."""

from __future__ import annotations

import ssl

from app.src.settings import ApiSettings
from connector.errors import ConfigurationError


def context(api: ApiSettings) -> ssl.SSLContext | None:
    """None: http. Raises ConfigurationError for files that cannot be read, or that do not belong together."""
    if api.tls_certificate is None or api.tls_key is None:
        return None
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.options |= ssl.OP_NO_RENEGOTIATION  # which costs the server far more than who asks for it
    for path, setting in ((api.tls_certificate, "api.tls_certificate"), (api.tls_key, "api.tls_key")):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigurationError(f"{setting}: {path} cannot be read ({error.strerror})") from None
    try:
        made.load_cert_chain(api.tls_certificate, api.tls_key, password=_no_password)
    except (ssl.SSLError, ValueError):
        raise ConfigurationError(
            f"{api.tls_certificate} and {api.tls_key} are not a certificate and its private key, both PEM and the key "
            "without a password (settings api.tls_certificate, api.tls_key)"
        ) from None
    return made


def _no_password() -> str:
    """Without it OpenSSL asks at the terminal."""
    raise ValueError

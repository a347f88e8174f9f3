"""The certificate of the REST service: can it be used, and for how long? Never shows the key."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from app.src.observe.doctor.report import Fault
from app.src.settings import ApiSettings

EXPIRES_SOON = timedelta(days=14)
_EVERYBODY = 0o007
_RENEW = "renew it and put it in its place: the service takes it up without a restart"


def of_service(api: ApiSettings) -> str:
    assert api.tls_certificate is not None
    assert api.tls_key is not None
    try:
        certificate = x509.load_pem_x509_certificate(api.tls_certificate.read_bytes())
        mode = api.tls_key.stat().st_mode
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(api.tls_certificate, api.tls_key, password="")
    except OSError as error:
        if isinstance(error, ssl.SSLError):
            raise Fault("certificate and key do not belong together, or are not PEM", _pair(api)) from None
        raise Fault(f"{error.filename or api.tls_key} cannot be read ({error.strerror})", _pair(api)) from None
    except ValueError:
        raise Fault(f"{api.tls_certificate} is no PEM certificate", _pair(api)) from None
    now, ends = datetime.now(UTC), certificate.not_valid_after_utc
    if now < certificate.not_valid_before_utc:
        raise Fault(f"the certificate is valid from {certificate.not_valid_before_utc:%Y-%m-%d} on", "check the clock")
    if ends < now:
        raise Fault(f"the certificate ended on {ends:%Y-%m-%d}", _RENEW)
    if ends - now < EXPIRES_SOON:
        raise Fault(f"the certificate ends on {ends:%Y-%m-%d}, in {(ends - now).days} days", _RENEW)
    if mode & _EVERYBODY:
        raise Fault(f"{api.tls_key} can be read by everybody on this machine", f"chmod o= {api.tls_key}")
    return f"certificate for {', '.join(_names(certificate)) or 'no name'} valid until {ends:%Y-%m-%d}"


def _pair(api: ApiSettings) -> str:
    files = [Path(file).name for file in (api.tls_certificate, api.tls_key) if file is not None]
    return (
        f"correct [api] tls_certificate and tls_key ({' and '.join(files)}): the chain, and its key without a password"
    )


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in found]

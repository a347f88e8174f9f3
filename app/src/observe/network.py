"""Checks of the connection to a HANA, step by step: address, name, port, TLS. Sends no login."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import time
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.x509.oid import NameOID

from app.src.observe import Fault
from app.src.settings import HanaSettings

PATIENCE = 8.0  # seconds for a connection; `connect_timeout` may reduce it
EXPIRES_SOON = timedelta(days=14)
_ANSWER_WITHIN = 4.0
_PORTS = "443 Cloud, 3NN13 or 3NN15 on-premise"


class Network:
    """The checks of one HANA. `prefix`: of its environment variables, HANA, or HANA_STORE for a separate store."""

    def __init__(self, hana: HanaSettings, prefix: str = "HANA") -> None:
        self._hana = hana
        self._prefix = prefix
        self._section = "hana" if prefix == "HANA" else "store.hana"
        self._host = hana.host or ""
        self._place = f"{hana.host}:{hana.port}"
        self._patience = min(hana.connect_timeout, PATIENCE)

    def dns(self) -> str:
        if not self._host:
            raise Fault("no HANA host is set", f"set [{self._section}] host in owl-sap.toml, or {self._prefix}_HOST")
        try:
            found = socket.getaddrinfo(self._host, self._hana.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise Fault(
                f"the name {self._host} cannot be resolved",
                f"check {self._prefix}_HOST (only a name, without protocol or port) and this machine's DNS server",
            ) from None
        return f"{self._host} is {', '.join(sorted({str(address[4][0]) for address in found}))}"

    def tcp(self) -> str:
        start, names = time.perf_counter(), f"{self._prefix}_HOST and {self._prefix}_PORT ({_PORTS})"
        try:
            self._connect().close()
        except ConnectionRefusedError:
            why, fix = "refuses connections: nothing listens there", f"check {names}, and that the instance is running"
        except TimeoutError:
            why = f"does not answer within {self._patience:g} s"
            fix = f"check for a firewall, a VPN or HANA Cloud's allow-list in between; check {names} too"
        except OSError as error:
            why = f"cannot be reached ({error.strerror or type(error).__name__})"
            fix = f"check this machine's network, {names}"
        else:
            return f"connected in {(time.perf_counter() - start) * 1000:.0f} ms"
        raise Fault(f"{self._place} {why}", fix)

    def tls(self) -> str:
        if not self._hana.encrypt:
            return "off (encrypt = false): everything, including the login, crosses the network in plain text"
        try:
            version, certificate = self._handshake()
        except ssl.SSLCertVerificationError as error:
            names, issuer = [], "an unknown authority"
            with contextlib.suppress(OSError, ValueError):
                _, certificate = self._handshake(checked=False)  # otherwise Python returns no rejected certificate
                names, issuer = names_of(certificate), _organisation(certificate.issuer) or issuer
            fixes = {  # by OpenSSL's X509_V_ERR_* code
                10: "renew it on the server; if it is not that old, correct this machine's clock",  # expired
                9: "correct this machine's clock",  # not yet valid
                62: self._other_name(names),  # host name mismatch
                64: self._other_name(names),  # IP address mismatch
            }
            unknown = (
                f"set {self._prefix}_SSL_TRUST_STORE to a PEM file with the certificate of {issuer}, obtained from "
                "the server's administrator (openssl s_client -showcerts -connect "
                f"{self._place} shows what the server presents)"
            )
            named = f"the certificate for {', '.join(names) or 'no name'} by {issuer}"
            raise Fault(
                f"{named} is not accepted: {error.verify_message}", fixes.get(error.verify_code, unknown)
            ) from None
        except OSError as error:
            why = getattr(error, "reason", None) or type(error).__name__
            raise Fault(
                f"no TLS with the server at {self._place} ({why})",
                f"check {self._prefix}_HOST and {self._prefix}_PORT ({_PORTS}); a stopped HANA Cloud instance must be "
                f"started; only where the server has no TLS, set {self._prefix}_ENCRYPT=false",
            ) from None
        if not self._hana.validate_certificate:
            return f"{version}; the certificate is NOT checked (validate_certificate = false)"
        names, until = names_of(certificate), certificate.not_valid_after_utc
        if self._by_address:
            raise Fault(
                f"{self._host} is an address, and the driver matches only names against certificates; this one is for "
                f"{', '.join(names) or 'no name'}",
                self._other_name(names),
            )
        left = until - datetime.now(UTC)
        days = round(left / timedelta(days=1))
        if left < EXPIRES_SOON:
            raise Fault(
                f"the certificate expires on {until:%Y-%m-%d}, in {days} days",
                "renew it before then; afterwards no connection works",
            )
        return f"{version}, certificate for {', '.join(names)} valid until {until:%Y-%m-%d} ({days} days)"

    def _connect(self) -> socket.socket:
        connection = socket.create_connection((self._host, self._hana.port), self._patience)
        connection.settimeout(_ANSWER_WITHIN)
        return connection

    def _handshake(self, *, checked: bool = True) -> tuple[str, x509.Certificate]:
        """Return the TLS version and the certificate. Connects as the driver would; unless `checked`, accepts any
        certificate. Raises Fault for an unusable trust store."""
        store, name = self._hana.trust_store, self._hana.host_name_in_certificate or self._host
        if not checked or not self._hana.validate_certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # only to read the certificate: send no secret over it
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE  # nosemgrep: owl-certificate-unchecked - only looked at
        elif not store:
            context = ssl.create_default_context()
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            is_pem, variable = "-----BEGIN" in store, f"{self._prefix}_SSL_TRUST_STORE"
            try:
                context.load_verify_locations(None if is_pem else store, None, store if is_pem else None)
            except OSError as error:
                where = f"the PEM in {variable}" if is_pem else f"the trust store {store}"
                raise Fault(
                    f"{where} cannot be used ({getattr(error, 'reason', None) or error.strerror or error})",
                    f"{variable} must name a readable file with certificates in PEM form, or hold them "
                    "(from DER: openssl x509 -inform der -in FILE -out ca.pem)",
                ) from None
        if self._by_address:  # `tls` reports it: Python matches addresses, but the driver never does
            context.check_hostname = False
        with self._connect() as plain, context.wrap_socket(plain, server_hostname=name) as secured:
            presented = secured.getpeercert(binary_form=True) or b""
            return str(secured.version()), x509.load_der_x509_certificate(presented)

    @property
    def _by_address(self) -> bool:
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(self._hana.host_name_in_certificate or self._host)
            return True
        return False

    def _other_name(self, names: list[str]) -> str:
        name = next((name for name in names if "*" not in name), "NAME")
        return f'use a name of the certificate as {self._prefix}_HOST, or host_name_in_certificate = "{name}"'


def names_of(certificate: x509.Certificate) -> list[str]:
    """Return the alternative names and addresses of a certificate, or its common name if it has none."""
    try:
        alternative = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return [name] if (name := _organisation(certificate.subject)) else []
    return [str(name.value) for name in alternative]


def _organisation(name: x509.Name) -> str:
    found = [*name.get_attributes_for_oid(NameOID.COMMON_NAME), *name.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)]
    return str(found[0].value) if found else ""

"""Doctor's way to a HANA, step by step as a connection goes: name, port, certificate. Sends no login and no secret."""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.src.observe.doctor.report import Fault
from app.src.settings import HanaSettings

PATIENCE = 8.0
"""Seconds for a name or a connection; `connect_timeout` may make it less."""
_ANSWER_WITHIN = 4.0
_EXPIRES_SOON = 14 * 86_400
_GREETING = bytes.fromhex("ff ff ff ff 04 14 00 04 01 00 00 01 01 01")
"""What a client says first: SAP HANA SQL Command Network Protocol, initialisation request. The reply has 8 bytes."""
_REPLY_BYTES = 8
_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which Python has no name for."""
_EXPIRED, _NOT_YET, _SELF_SIGNED, _SELF_SIGNED_IN_CHAIN, _OTHER_NAME, _OTHER_ADDRESS = 10, 9, 18, 19, 62, 64
"""OpenSSL's X509_V_ERR_* codes."""


class Network:
    """The steps for one HANA. `prefix` names its variables: HANA, or HANA_STORE for a separate store."""

    def __init__(self, hana: HanaSettings, prefix: str = "HANA") -> None:
        self._hana = hana
        self._prefix = prefix
        self._host = hana.host or ""
        self._place = f"{hana.host}:{hana.port}"
        self._patience = min(hana.connect_timeout, PATIENCE)

    def address(self) -> str:
        if not self._host:
            section = "hana" if self._prefix == "HANA" else "store.hana"
            raise Fault("no HANA host is set", f"set [{section}] host in owl-sap.toml, or {self._prefix}_HOST")
        return self._place

    def dns(self) -> str:
        addresses = sorted({str(address[4][0]) for address in self._resolve()})
        return f"{self._host} is {', '.join(addresses)}"

    def tcp(self) -> str:
        start = time.perf_counter()
        try:
            self._connect().close()
        except ConnectionRefusedError:
            raise Fault(
                f"{self._place} refuses connections: nothing listens there",
                f"check {self._prefix}_PORT (443 Cloud, 3NN13 or 3NN15 on-premise), and that the instance is running",
            ) from None
        except TimeoutError:
            raise Fault(
                f"{self._place} does not answer within {self._patience:g} s",
                f"check for a firewall, a VPN or HANA Cloud's allow-list in between; check {self._prefix}_HOST and "
                f"{self._prefix}_PORT too",
            ) from None
        except OSError as error:
            raise Fault(
                f"{self._place} cannot be reached ({error.strerror or type(error).__name__})",
                f"check this machine's network, {self._prefix}_HOST and {self._prefix}_PORT",
            ) from None
        return f"connected in {(time.perf_counter() - start) * 1000:.0f} ms"

    def tls(self) -> str:
        if not self._hana.encrypt:
            return self._plain()
        trust = self._trust()
        try:
            secured_by, certificate = self._handshake(self._context())
        except ssl.SSLCertVerificationError as error:
            raise self._not_accepted(error) from None
        except OSError as error:
            raise self._no_tls(error) from None
        if not self._hana.validate_certificate:
            return f"{secured_by}; the certificate is NOT checked (validate_certificate = false)"
        self._check_address(certificate)
        return f"{secured_by}, {_expiry(certificate)}{trust}"

    # --------------------------------------------------------------------------------------------------- connections

    def _resolve(self) -> list[Any]:
        """The system's resolver knows no time limit, so it is asked on a thread that is left behind if need be."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(socket.getaddrinfo(self._host, self._hana.port, type=socket.SOCK_STREAM))
            except (OSError, UnicodeError) as error:
                answers.put(error)

        threading.Thread(target=ask, daemon=True, name="doctor-dns").start()
        fix = f"check {self._prefix}_HOST (only a name, without protocol or port) and this machine's DNS server"
        try:
            found = answers.get(timeout=self._patience)
        except queue.Empty:
            raise Fault(f"the DNS server does not answer for {self._host} within {self._patience:g} s", fix) from None
        if isinstance(found, Exception):
            raise Fault(f"the name {self._host} cannot be resolved", fix)
        addresses: list[Any] = found
        return addresses

    def _connect(self) -> socket.socket:
        """To the first address that answers, within `_patience` for all of them together."""
        deadline = time.monotonic() + self._patience
        addresses = self._resolve()
        failure: OSError = TimeoutError()
        for left, (family, kind, protocol, _, address) in zip(range(len(addresses), 0, -1), addresses, strict=True):
            connection = socket.socket(family, kind, protocol)
            connection.settimeout(max(0.2, (deadline - time.monotonic()) / left))
            try:
                connection.connect(address)
            except OSError as error:
                connection.close()
                failure = error
            else:
                connection.settimeout(_ANSWER_WITHIN)
                return connection
        raise failure

    def _handshake(self, context: ssl.SSLContext) -> tuple[str, Mapping[str, Any]]:
        name = self._hana.host_name_in_certificate or self._host
        with self._connect() as plain, context.wrap_socket(plain, server_hostname=name) as secured:
            return str(secured.version()), secured.getpeercert() or {}

    def _greeting_reply(self) -> bytes:
        """What answers a HANA client's first words in plain text; b"" for nothing."""
        reply = b""
        with contextlib.suppress(OSError), self._connect() as plain:
            plain.sendall(_GREETING)
            while len(reply) < _REPLY_BYTES and (piece := plain.recv(_REPLY_BYTES - len(reply))):
                reply += piece
        return reply

    # --------------------------------------------------------------------------------------------------- certificates

    def _trust(self) -> str:
        """A note on the trust store; Fault for one that cannot work: the driver tells none of these apart."""
        store = self._hana.trust_store
        if not store or not self._hana.validate_certificate:
            return ""
        variable = f"{self._prefix}_SSL_TRUST_STORE"
        text, where = store, f"the PEM in {variable}"
        if "-----BEGIN" not in store:
            path = Path(store)
            where = f"the trust store {store}"
            if not path.is_file():
                raise Fault(f"{where} does not exist or is not a file", f"correct {variable}")
            try:
                text = path.read_text(encoding="ascii", errors="replace")
            except OSError as error:
                why = error.strerror or type(error).__name__
                raise Fault(f"{where} cannot be read ({why})", f"give this user the right to read {store}") from None
        count = text.count("-----BEGIN CERTIFICATE-----")
        if not count:
            raise Fault(
                f"{where} holds no certificate in PEM form",
                "convert it: openssl x509 -inform der -in FILE -out ca.pem (of a PKCS 12 file: openssl pkcs12 -nokeys)",
            )
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
        except (ssl.SSLError, ValueError):
            raise Fault(
                f"{where} is damaged: a certificate in it cannot be read", f"copy it again, or correct {variable}"
            ) from None
        return f"; {where} holds {count} certificate{'s' if count > 1 else ''}"

    def _context(self) -> ssl.SSLContext:
        store = self._hana.trust_store
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if store else ssl.create_default_context()
        if store and "-----BEGIN" in store:
            context.load_verify_locations(cadata=store)
        elif store and self._hana.validate_certificate:
            context.load_verify_locations(cafile=store)
        if not self._hana.validate_certificate:
            return _no_check(context)
        # An address is looked for among the names later: the driver never matches one, Python would.
        context.check_hostname = not self._by_address
        return context

    @property
    def _by_address(self) -> bool:
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(self._hana.host_name_in_certificate or self._host)
            return True
        return False

    def _check_address(self, certificate: Mapping[str, Any]) -> None:
        if self._by_address:
            raise Fault(
                f"{self._host} is an address, and the driver matches only names against certificates; this one is for "
                f"{', '.join(_names(certificate)) or 'no name'}",
                self._other_name(certificate),
            )

    def _other_name(self, certificate: Mapping[str, Any]) -> str:
        name = next((name for name in _names(certificate) if "*" not in name), "NAME")
        section = "hana" if self._prefix == "HANA" else "store.hana"
        return (
            f"use a name of the certificate as {self._prefix}_HOST, or set "
            f'[{section}] host_name_in_certificate = "{name}"'
        )

    def _not_accepted(self, error: ssl.SSLCertVerificationError) -> Fault:
        certificate = self._presented()
        names = ", ".join(_names(certificate)) or "no name"
        issuer = _common_name(certificate.get("issuer")) or "an unknown authority"
        variable = f"{self._prefix}_SSL_TRUST_STORE"
        code = error.verify_code
        if code == _EXPIRED:
            return Fault(
                f"the certificate expired on {certificate.get('notAfter', 'a day in the past')}",
                "renew it on the server; if it is not that old, correct this machine's clock",
            )
        if code == _NOT_YET:
            return Fault(
                f"the certificate is valid only from {certificate.get('notBefore', 'a day in the future')}",
                "correct this machine's clock",
            )
        if code in (_OTHER_NAME, _OTHER_ADDRESS):
            wanted = self._hana.host_name_in_certificate or self._host
            return Fault(f"the certificate is for {names}, not for {wanted}", self._other_name(certificate))
        save = f"openssl s_client -showcerts -connect {self._place} shows it"
        if code == _SELF_SIGNED:
            return Fault(
                f"the certificate for {names} is self-signed and not trusted on this machine",
                f"compare it with the server's own, save it as PEM ({save}), and set {variable} to the file",
            )
        known = "the trust store" if self._hana.trust_store else "this machine"
        root = " (a self-signed root)" if code == _SELF_SIGNED_IN_CHAIN else ""
        return Fault(
            f"the certificate is from {issuer}{root}, which {known} does not know ({error.verify_message})",
            f"set {variable} to a PEM file with the certificate of {issuer}, got from whoever runs the server",
        )

    def _presented(self) -> Mapping[str, Any]:
        """The server's certificate, whatever is wrong with it: Python shows only accepted ones, so it is accepted for
        itself alone in a second handshake. Nothing is sent over it."""
        with contextlib.suppress(OSError, ValueError):
            with self._connect() as plain, _no_check().wrap_socket(plain, server_hostname=self._host) as secured:
                own = secured.getpeercert(binary_form=True)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.load_verify_locations(cadata=own or b"")
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(_NO_CHECK_TIME)
            return self._handshake(context)[1]
        return {}

    # ----------------------------------------------------------------------------------------------- TLS or plain text

    def _plain(self) -> str:
        reply = self._greeting_reply()
        if _is_hana(reply):
            return "off (encrypt = false): everything, including the login, crosses the network in plain text"
        if reply.startswith(b"HTTP"):
            raise self._a_web_server()
        with contextlib.suppress(OSError):
            self._handshake(_no_check())
            raise Fault(
                f"{self._place} speaks TLS, but encrypt = false",
                f"set {self._prefix}_ENCRYPT=true",
            )
        raise self._no_hana()

    def _no_tls(self, error: OSError) -> Fault:
        reply = self._greeting_reply()
        if _is_hana(reply):
            return Fault(
                f"{self._place} speaks plain text, and encrypt is on",
                f"use the port with TLS; only where the server has no TLS, set {self._prefix}_ENCRYPT=false",
            )
        if reply.startswith(b"HTTP"):
            return self._a_web_server()
        if isinstance(error, ssl.SSLError) and "PROTOCOL" in str(error.reason):
            return Fault(
                f"{self._place} offers only outdated TLS ({error.reason})", "update the server: TLS 1.2 or newer"
            )
        return self._no_hana()

    def _a_web_server(self) -> Fault:
        return Fault(
            f"a web server answers at {self._place}, not HANA's SQL port",
            f"check {self._prefix}_PORT: 443 Cloud, 3NN13 or 3NN15 on-premise",
        )

    def _no_hana(self) -> Fault:
        return Fault(
            f"the server at {self._place} is not HANA: it answers neither with TLS nor in plain text as HANA does",
            f"check {self._prefix}_HOST and {self._prefix}_PORT; a stopped HANA Cloud instance must be started",
        )


def _no_check(context: ssl.SSLContext | None = None) -> ssl.SSLContext:
    """For looking only: no secret goes over such a connection."""
    context = context or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nosemgrep: owl-certificate-unchecked - the certificate is only looked at
    return context


def _is_hana(reply: bytes) -> bool:
    return len(reply) == _REPLY_BYTES and not reply.startswith((b"HTTP", b"\x15\x03", b"\x16\x03"))


def _names(certificate: Mapping[str, Any]) -> list[str]:
    """Those the certificate is for, its addresses too; the common name where there is no other."""
    names = [str(name) for _, name in certificate.get("subjectAltName", ())]
    common = _common_name(certificate.get("subject"))
    return names or ([common] if common else [])


def _common_name(distinguished: Any) -> str:
    parts = {key: value for part in distinguished or () for key, value in part}
    return str(parts.get("commonName") or parts.get("organizationName") or "")


def _expiry(certificate: Mapping[str, Any]) -> str:
    until = str(certificate.get("notAfter", ""))
    left = ssl.cert_time_to_seconds(until) - time.time()
    if left < _EXPIRES_SOON:
        raise Fault(
            f"the certificate expires on {until}, in {left / 86_400:.0f} days",
            "renew it before then; afterwards no connection works",
        )
    return f"certificate for {', '.join(_names(certificate))} valid until {until} ({left / 86_400:.0f} days)"

"""Create the emulator's certificate authority and server certificate, and configure TLS."""

from __future__ import annotations

import datetime
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_FOLDER, _AUTHORITY, _AUTHORITY_KEY, _SERVER = "tls", "ca.pem", "ca-key.pem", "server.pem"
_EXPIRED_DAYS = 2


@dataclass(frozen=True, slots=True)
class Tls:
    """A server's TLS. `trust_store`: PEM file of the authority, for clients."""

    context: ssl.SSLContext
    trust_store: Path


def prepare(folder: Path, name: str | None = None, *, expired: bool = False) -> Tls:
    """Return the TLS of a data folder. Authority and certificate are created once; only the owner can read the keys.

    For tests, `name` (instead of the loopback names) or `expired` creates an invalid certificate of the same authority.
    """
    place = folder / _FOLDER
    place.mkdir(mode=0o700, exist_ok=True)
    authority = _authority(place)
    server = place / _SERVER
    if name is not None or expired:
        server = place / "unfit.pem"
        _issue(authority, server, (name,) if name is not None else LOOPBACK_NAMES, expired)
    elif not server.exists():
        _issue(authority, server, LOOPBACK_NAMES, expired)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(server)
    return Tls(context, (place / _AUTHORITY).absolute())


def _authority(place: Path) -> trustme.CA:
    certificate, key = place / _AUTHORITY, place / _AUTHORITY_KEY
    if certificate.exists() and key.exists():
        return trustme.CA.from_pem(certificate.read_bytes(), key.read_bytes())
    authority = trustme.CA(organization_name="SAP HANA emulator", organization_unit_name="tests and demonstration")
    _write(key, authority.private_key_pem.bytes())
    _write(certificate, authority.cert_pem.bytes())
    (place / _SERVER).unlink(missing_ok=True)  # signed by the old authority
    return authority


def _issue(authority: trustme.CA, file: Path, names: tuple[str, ...], expired: bool) -> None:
    now = datetime.datetime.now(datetime.UTC)
    ended = now - datetime.timedelta(days=1)
    leaf = authority.issue_cert(
        *names,
        common_name=names[0],
        not_before=ended - datetime.timedelta(days=_EXPIRED_DAYS) if expired else None,
        not_after=ended if expired else None,
    )
    _write(file, leaf.private_key_and_cert_chain_pem.bytes())


def _write(file: Path, data: bytes) -> None:
    """Write atomically; other users can never read the file."""
    draft = file.with_suffix(".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(data)
    draft.replace(file)

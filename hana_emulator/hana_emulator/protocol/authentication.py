"""SCRAM logins (SCRAMSHA256, SCRAMPBKDF2SHA256), server side, and the field lists they travel in."""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from hana_emulator.protocol.codes import ProtocolError

SCRAM_PBKDF2 = b"SCRAMPBKDF2SHA256"
SCRAM = b"SCRAMSHA256"
ITERATIONS = 15_000  # hdbcli refuses fewer ("Number of iterations is too small")
_SALT_SIZE, _NONCE_SIZE, _PROOF_SIZE = 16, 48, 32
_SECRET = os.urandom(32)
_LONGEST_SHORT_FIELD = 245
# Length prefixes of fields above 245 bytes: go-hdb writes 246, SAP's reference specifies 255
_WIDE_LENGTHS = {246: "<H", 255: ">H"}


def parse_fields(data: bytes) -> list[bytes]:
    """Read a field list: count (u16), then each field prefixed with its length."""
    if len(data) < 2:
        raise ProtocolError("authentication part is too short")
    (count,) = struct.unpack_from("<H", data)
    if count == 0x0100:  # node-hdb writes the inner list's count of 1 as big-endian
        count = 1
    fields, position = [], 2
    for _ in range(count):
        start, length = _field(data, position)
        position = start + length
        fields.append(data[start:position])
    if position > len(data):
        raise ProtocolError("authentication field ends after its part")
    return fields


def _field(data: bytes, position: int) -> tuple[int, int]:
    """Start and length of the field whose length prefix is at `position`."""
    try:
        length = data[position]
        if form := _WIDE_LENGTHS.get(length):
            return position + 3, struct.unpack_from(form, data, position + 1)[0]
    except (IndexError, struct.error):
        raise ProtocolError("authentication part ends inside a field") from None
    return position + 1, length


def build_fields(fields: Sequence[bytes]) -> bytes:
    pieces = [struct.pack("<H", len(fields))]
    for field in fields:
        size = len(field)
        pieces.append(bytes([size]) if size <= _LONGEST_SHORT_FIELD else struct.pack("<BH", 246, size))
        pieces.append(field)
    return b"".join(pieces)


# Cached: a call takes 5 ms, and a user's salt stays the same, as in HANA.
_pbkdf2 = functools.lru_cache(64)(functools.partial(hashlib.pbkdf2_hmac, "sha256", iterations=ITERATIONS, dklen=32))


@dataclass(frozen=True, slots=True)
class Challenge:
    """The server's state between the two requests of a login."""

    user: str
    method: bytes
    client_challenge: bytes
    salt: bytes
    nonce: bytes

    def reply(self) -> bytes:
        """The AUTHENTICATION part for the first request."""
        fields = [self.salt, self.nonce]
        if self.method == SCRAM_PBKDF2:
            fields.append(ITERATIONS.to_bytes(4, "big"))
        return build_fields([self.method, build_fields(fields)])

    def verify(self, data: bytes, password: str | None) -> bytes | None:
        """The AUTHENTICATION part with the server's proof; None if the client's proof is wrong.

        An unknown user costs the same work as a wrong password, so that timing does not reveal which users exist.
        """
        fields = parse_fields(data)
        if len(fields) != 3:
            raise ProtocolError(f"client proof of {len(fields)} fields, 3 expected")
        inner = parse_fields(fields[2])
        if len(inner) != 1 or len(inner[0]) != _PROOF_SIZE:
            raise ProtocolError(f"client proof is not one field of {_PROOF_SIZE} bytes")
        same_login = fields[0].decode("utf-8", "replace") == self.user and fields[1] == self.method
        clear = hmac.digest(_SECRET, self.salt, "sha256") if password is None else password.encode()
        salted = _pbkdf2(clear, self.salt) if self.method == SCRAM_PBKDF2 else hmac.digest(clear, self.salt, "sha256")
        key = hashlib.sha256(salted).digest()
        signed = self.salt + self.nonce + self.client_challenge
        signature = hmac.digest(hashlib.sha256(key).digest(), signed, "sha256")
        matches = hmac.compare_digest(bytes(a ^ b for a, b in zip(signature, key, strict=True)), inner[0])
        if not (same_login and matches):
            return None
        if self.method == SCRAM:
            return build_fields([self.method, b""])
        signed = self.client_challenge + self.salt + self.nonce
        proof = hmac.digest(hmac.digest(salted, self.salt, "sha256"), signed, "sha256")
        return build_fields([self.method, build_fields([proof])])


def begin(data: bytes) -> Challenge | None:
    """The challenge for the client's best method; None if it offers no SCRAM method."""
    fields = parse_fields(data)
    if len(fields) < 3:
        raise ProtocolError("authentication request names no method")
    offered = dict(zip(fields[1::2], fields[2::2], strict=False))
    user = fields[0].decode("utf-8", "replace")
    for method in (SCRAM_PBKDF2, SCRAM):
        if method in offered:
            salt = hmac.digest(_SECRET, fields[0], "sha256")[:_SALT_SIZE]
            return Challenge(user, method, offered[method], salt, os.urandom(_NONCE_SIZE))
    return None

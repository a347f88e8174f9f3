"""CESU-8, the text encoding of the protocol and of HANA's binary strings: UTF-8, but with two 3-byte surrogates
for each character above U+FFFF."""

from __future__ import annotations

import re
import struct

_ASTRAL = re.compile("[\U00010000-\U0010ffff]")


def encode(text: str) -> bytes:
    """Encode text. Unpaired surrogates are kept: a LOB piece may split a pair."""
    if text.isascii():
        return text.encode()
    pairs = _ASTRAL.sub(lambda match: "".join(map(chr, struct.unpack("<2H", units(match.group())))), text)
    return pairs.encode("utf-8", "surrogatepass")


def decode(data: bytes) -> str:
    """Decode bytes. Surrogate pairs are joined, unpaired ones stay. Raises UnicodeDecodeError for invalid CESU-8."""
    if data.isascii():
        return data.decode()
    text = data.decode("utf-8", "surrogatepass")
    if b"\xed" not in data:  # the only lead byte of surrogates
        return text
    return units(text).decode("utf-16-le", "surrogatepass")


def units(text: str) -> bytes:
    """Encode as UTF-16 (little-endian); lengths and offsets of character LOBs count its 2-byte units."""
    return text.encode("utf-16-le", "surrogatepass")


def from_units(data: bytes) -> bytes:
    """Convert UTF-16 units to CESU-8; they may begin or end inside a surrogate pair."""
    return encode(data.decode("utf-16-le", "surrogatepass"))

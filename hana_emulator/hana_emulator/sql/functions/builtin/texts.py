"""String and binary functions. As in HANA's NVARCHAR, a character above U+FFFF counts as two."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from hana_emulator import cesu8
from hana_emulator.errors import HanaError
from hana_emulator.sql.language.limits import check_built
from hana_emulator.types import MAX_LENGTH

from . import numbers

_SURROGATE = re.compile("[\ud800-\udfff]")


def plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.hex().upper()
    return (
        (str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value))
        if isinstance(value, float)
        else str(value)
    )


def _units(text: str) -> bytes:
    return text.encode("utf-16-le", "surrogatepass")


def _text(units: bytes) -> str:
    """Decode UTF-16; an unpaired surrogate cannot be stored and becomes U+FFFD."""
    return units.decode("utf-16-le", "replace")


def whole(text: str) -> str:
    """`text` with unpaired surrogates replaced, so that SQLite can store it."""
    return _text(_units(text)) if not text.isascii() and _SURROGATE.search(text) else text


def _wide(text: str) -> bool:
    return not text.isascii() and max(text) > "\uffff"


def length(value: Any) -> int:
    if isinstance(value, bytes):
        return len(value)
    text = plain(value)
    return len(_units(text)) // 2 if _wide(text) else len(text)


def cut(text: str, start: int, end: int | None) -> str:
    """Return `text[start:end]`, counted in HANA's characters; `start` and `end` must not be negative."""
    if not _wide(text):
        return text[start:end]
    return _text(_units(text)[2 * start : None if end is None else 2 * end])


def substring(value: Any, position: Any, count: Any = None) -> Any:
    """The substring from a 1-based position; a position below 1 means 1, a length below 1 gives ''."""
    start = max(int(numbers.number(position)), 1) - 1
    end = None if count is None else start + max(int(numbers.number(count)), 0)
    return value[start:end] if isinstance(value, bytes) else cut(plain(value), start, end)


def left(value: Any, count: Any) -> str:
    return cut(plain(value), 0, max(int(numbers.number(count)), 0))


def right(value: Any, count: Any) -> str:
    text = plain(value)
    return cut(text, max(length(text) - max(int(numbers.number(count)), 0), 0), None)


def upper(value: Any) -> str:
    return plain(value).upper()


def lower(value: Any) -> str:
    return plain(value).lower()


def initcap(value: Any) -> str:
    return re.sub(r"\w+", lambda word: word[0][0].upper() + word[0][1:].lower(), plain(value))


def trim(value: Any, characters: Any = " ") -> str:
    return plain(value).strip(plain(characters))


def ltrim(value: Any, characters: Any = " ") -> str:
    return plain(value).lstrip(plain(characters))


def rtrim(value: Any, characters: Any = " ") -> str:
    return plain(value).rstrip(plain(characters))


def lpad(value: Any, width: Any, pattern: Any = " ") -> str:
    text, wanted = plain(value), _width(width)
    return (_padding(plain(pattern), wanted - len(text)) + text)[:wanted]


def rpad(value: Any, width: Any, pattern: Any = " ") -> str:
    text, wanted = plain(value), _width(width)
    return (text + _padding(plain(pattern), wanted - len(text)))[:wanted]


def _width(value: Any) -> int:
    wanted = int(numbers.number(value))
    if wanted > MAX_LENGTH:
        raise HanaError(306, f"invalid argument: a text is padded to {MAX_LENGTH} characters at most")
    return max(wanted, 0)


def _padding(pattern: str, count: int) -> str:
    return (pattern * (count // len(pattern) + 1))[:count] if pattern and count > 0 else ""


def replace(value: Any, old: Any, new: Any) -> str:
    text, searched, inserted = plain(value), plain(old), plain(new)
    if not searched:
        return text
    if len(inserted) > len(searched):
        check_built(len(text) + text.count(searched) * (len(inserted) - len(searched)))
    return text.replace(searched, inserted)


def locate(haystack: Any, needle: Any, start: Any = 1, occurrence: Any = 1) -> int:
    """The 1-based position; 0 if absent. A negative start searches backwards from the end."""
    text, searched, begin = plain(haystack), plain(needle), int(numbers.number(start))
    if begin < 0:
        return text.rfind(searched, 0, len(text) + begin + 1) + 1
    found = max(begin, 1) - 2
    for _ in range(max(int(numbers.number(occurrence)), 1)):
        found = text.find(searched, found + 1)
        if found < 0:
            return 0
    return found + 1


def substring_before(value: Any, pattern: Any) -> str:
    head, separator, _ = _parted(value, pattern)
    return head if separator else ""


def substring_after(value: Any, pattern: Any) -> str:
    return _parted(value, pattern)[2]


def _parted(value: Any, pattern: Any) -> tuple[str, str, str]:
    """Partition the text at the pattern; an empty pattern matches before the first character."""
    text, searched = plain(value), plain(pattern)
    return text.partition(searched) if searched else ("", "", text)


def reverse(value: Any) -> str:
    return plain(value)[::-1]


def code_point(value: Any) -> int | None:
    text = plain(value)
    return ord(text[0]) if text else None


def character(code: Any) -> str:
    try:
        return chr(int(numbers.number(code)))
    except (ValueError, OverflowError):
        raise HanaError(306, "invalid argument: not a character code") from None


def to_binary(value: Any) -> bytes:
    """Encode text as CESU-8, like HANA; this differs from UTF-8 above U+FFFF."""
    return value if isinstance(value, bytes) else cesu8.encode(plain(value))


def encoded(value: Any, codepage: Any = "UTF-8") -> bytes:
    """Encode text for STRTOBIN, which names the encoding."""
    if plain(codepage).upper() not in ("UTF-8", "UTF8"):
        raise HanaError(306, "invalid argument: this emulator knows the code page UTF-8 only")
    return plain(value).encode()


def binary_to_text(value: Any) -> str:
    try:
        return cesu8.decode(to_binary(value))
    except UnicodeDecodeError:
        raise HanaError(306, "invalid argument: the bytes are no UTF-8 text") from None


def binary_to_hex(value: Any) -> str:
    return to_binary(value).hex().upper()


def hex_to_binary(value: Any) -> bytes:
    try:
        return bytes.fromhex(plain(value))
    except ValueError:
        raise HanaError(306, "invalid argument: HEXTOBIN needs an even number of hexadecimal digits") from None


def hash_sha256(*values: Any) -> bytes:
    return hashlib.sha256(b"".join(map(to_binary, values))).digest()


def hash_md5(*values: Any) -> bytes:
    return hashlib.md5(b"".join(map(to_binary, values)), usedforsecurity=False).digest()


_TOKEN = re.compile(
    r"""\s*(?: "(?:[^"]|"")+" | '(?:[^']|'')*' | [\w#$]+ | <=|>=|<>|!=|\|\| | [-+*/%=<>(),.;:?@\[\]{}!&|^~] )""",
    re.VERBOSE,
)
_COMMENT = re.compile(r"--|/\*")


def is_injection_safe(text: Any, most: Any = 1) -> int:
    """1 if the text has at most `most` tokens, no comment and no unclosed quote; else 0."""
    written, limit = plain(text), int(numbers.number(most))
    position = count = 0
    end = len(written.rstrip())
    while position < end:
        if count > limit:
            return 0
        match = _TOKEN.match(written, position)
        if match is None or _COMMENT.match(written, match.start() + len(match[0]) - len(match[0].lstrip())):
            return 0
        position, count = match.end(), count + 1
    return int(count <= limit)

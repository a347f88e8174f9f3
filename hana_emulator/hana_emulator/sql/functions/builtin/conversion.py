"""Conversions that depend on the kind of value: TO_NVARCHAR, TO_DATE, TO_TIME, TO_TIMESTAMP; and SYSUUID."""

from __future__ import annotations

import re
import uuid
from typing import Any

from . import formats, fvecs, moments, texts

_MOMENT = re.compile(r"\d{4}-\d{2}-\d{2}([ T].*)?|\d{2}:\d{2}:\d{2}|\d{8}")


def to_nvarchar(value: Any, second: Any = None) -> str:
    """Convert any value to text. `second` is a format model (dates, numbers) or a maximum length."""
    if isinstance(second, int):
        return texts.left(value, second)
    if second is None:
        # Bytes that look like a vector are shown as one; values of known type use a typed function.
        if not isinstance(value, bytes):
            return texts.plain(value)
        count = int.from_bytes(value[:4], "little")
        return fvecs.to_text(value) if count and len(value) in (4 + 4 * count, 4 + 2 * count) else texts.plain(value)
    if isinstance(value, str) and _MOMENT.fullmatch(value):
        return formats.write_moment(value, second)
    return formats.write_number(value, second)


def to_date(value: Any, model: Any = None) -> str:
    return moments.to_date(value) if model is None else formats.read_moment(value, model).date()


def to_time(value: Any, model: Any = None) -> str:
    return moments.to_time(value) if model is None else formats.read_moment(value, model).time()


def to_seconddate(value: Any, model: Any = None) -> str:
    return moments.to_seconddate(value) if model is None else formats.read_moment(value, model).seconddate()


def to_timestamp(value: Any, model: Any = None) -> str:
    return moments.to_timestamp(value) if model is None else formats.read_moment(value, model).timestamp()


def sysuuid() -> bytes:
    return uuid.uuid4().bytes

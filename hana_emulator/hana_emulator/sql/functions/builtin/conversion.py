"""TO_NVARCHAR, TO_DATE and its kin, SYSUUID: conversions that pick their way by the kind of value."""

from __future__ import annotations

import re
import uuid
from typing import Any

from . import formats, fvecs, moments, texts

_MOMENT = re.compile(r"\d{4}-\d{2}-\d{2}([ T].*)?|\d{2}:\d{2}:\d{2}|\d{8}")


def to_nvarchar(value: Any, second: Any = None) -> str:
    """Any value as text. `second` is a format model (dates, numbers) or a length, as in `TO_NVARCHAR(x, 5)`."""
    if isinstance(second, int):
        return texts.left(value, second)
    if second is None:
        # Bytes of a vector's form show as a vector; where the type is known, the compiler calls a
        # typed one.
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

"""Rows as CSV (RFC 4180), in UTF-8 without a byte order mark, in parts of bounded size."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

# A spreadsheet runs a cell that begins with one of these as a formula, also with the full-width forms. OWASP, "CSV
# Injection": put an apostrophe before it. Plain numbers stay unchanged.
_FORMULA = re.compile(r"[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?\d+([.,]\d+)*([eE][+-]?\d+)?", re.ASCII)


def cell(value: Any) -> str:
    """Return a value as the text of a cell; null is empty, true and false are in lower case."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def lines(records: Iterable[Sequence[Any]]) -> bytes:
    """Return records as lines that end with CR and LF. Unpaired surrogates become "?"."""
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\r\n").writerows([cell(value) for value in record] for record in records)
    return out.getvalue().encode("utf-8", "replace")

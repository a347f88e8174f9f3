"""How much a JSON body may hold, and how many of its faults are found. pydantic tells of every element that does not
fit, and two megabytes hold hundreds of thousands: to find and describe them all stops the event loop for seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any

from pydantic import Field, Tag, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from app.src.api.errors import MOST_FAULTS, TooMuch

MOST_VALUES = 100_000
"""Of a body: texts, numbers, lists, objects and the like, at any depth."""
MOST_ITEMS = 65_536
"""Of one list; `api.max_inputs` allows no more. HANA's vectors have up to 65,000 numbers."""
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""Also one without an end, so that no start of one is looked at twice."""


def check_values(body: bytes) -> None:
    """Raises TooMuch for a body of more than MOST_VALUES values. Parses nothing: two megabytes take 2 to 20 ms."""
    encoding = json.detect_encoding(body)
    if not encoding.startswith("utf-8"):  # the parser reads the others too
        body = body.decode(encoding, "replace").encode()
    if _beginnings(body) <= MOST_VALUES:
        return
    bare, texts = _TEXT.subn(b"", body, count=2 * MOST_VALUES)  # a value has at most one name
    if texts == 2 * MOST_VALUES or _beginnings(bare) > MOST_VALUES:
        raise TooMuch(
            f"the body holds more than {MOST_VALUES} JSON values: send several requests with fewer texts, numbers or "
            "members each"
        )


def _beginnings(body: bytes) -> int:
    """As many as there are values, or more where texts hold these characters."""
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def few_faults(most: int) -> WrapValidator:
    """For a list of at most `most` items that are checked: it is checked slice by slice, and told of up to the first
    slice with faults."""

    def checked(items: Any, check: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(items, list) or len(items) <= MOST_FAULTS:
            return check(items)
        good: list[Any] = []
        for start in range(0, len(items), MOST_FAULTS):
            end = start + MOST_FAULTS
            try:
                good += check(items[start:end])
            except ValidationError:
                return check(items[:end])  # with the right positions
        return good if len(items) <= most else check(items)

    return WrapValidator(checked)


FEW_FAULTS = few_faults(MOST_ITEMS)
Texts = Annotated[list[str], Field(max_length=MOST_ITEMS), FEW_FAULTS, Tag("list[str]")]
Numbers = Annotated[list[int], Field(max_length=MOST_ITEMS), FEW_FAULTS, Tag("list[int]")]
ListsOfNumbers = Annotated[list[Numbers], Field(max_length=MOST_ITEMS), FEW_FAULTS, Tag("list[list[int]]")]


def few_unknown(given: Any, known: Mapping[str, Any]) -> Any:
    """An object without most of its members that are not `known`: the others are refused all the same."""
    if not isinstance(given, dict) or len(given) <= MOST_FAULTS:
        return given
    unknown = islice((name for name in given if name not in known), MOST_FAULTS)
    return {name: given[name] for name in known if name in given} | dict.fromkeys(unknown)

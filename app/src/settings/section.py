"""The base of every section of the settings, and durations such as "30s", "5m" and "1h30m"."""

from __future__ import annotations

import ipaddress
import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, WithJsonSchema


def _parts(value: Any) -> Any:
    """Split a string at commas: a variable `MANDT, MATNR` holds two names."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Columns = Annotated[tuple[str, ...], BeforeValidator(_parts)]


def _networks(addresses: tuple[str, ...]) -> tuple[str, ...]:
    for address in addresses:
        try:
            ipaddress.ip_network(address)
        except ValueError:
            raise ValueError(f"{address!r} is not an address or network such as 10.0.0.0/8") from None
    return addresses


Networks = Annotated[tuple[str, ...], BeforeValidator(_parts), AfterValidator(_networks)]


class Section(BaseModel):
    # `schema` is the word of SAP's own clients; pydantic's deprecated method of that name is given up for it.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)


LONGEST = 3650 * 86_400.0  # ten years, in seconds: more is a slip of the pen, and dates end somewhere
_NUMBER = r"(\d+(?:\.\d+)?)"
_PARTS = re.compile("".join(f"(?:{_NUMBER}{unit})?" for unit in "dhms"), re.ASCII)
_UNITS = (86_400, 3600, 60, 1)
_EXAMPLES = 'write it like "30s", "5m", "1h30m" or "1d"'


def seconds(text: str) -> float:
    """Return seconds. Units d, h, m and s, each once, in this order; a bare number is seconds. Raises ValueError."""
    word = "".join(text.split()).lower()
    if re.fullmatch(_NUMBER, word, re.ASCII):
        word += "s"
    match = _PARTS.fullmatch(word)
    if not word or match is None:
        raise ValueError(f"{text!r} is not a duration: {_EXAMPLES}")
    parts = zip(match.groups(), _UNITS, strict=True)
    return _bounded(sum(float(number) * unit for number, unit in parts if number is not None))


def _bounded(length: float) -> float:
    if not (math.isfinite(length) and 0 <= length <= LONGEST):
        raise ValueError(f"a duration must be between 0 and {LONGEST / 86_400:.0f}d: {_EXAMPLES}")
    return length


def _seconds(value: Any) -> Any:
    """Accept a duration or a number of seconds."""
    if isinstance(value, str):
        return seconds(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _bounded(float(value))
    raise ValueError(f"must be a duration: {_EXAMPLES}")


# Seconds, in a settings model.
Duration = Annotated[
    float,
    BeforeValidator(_seconds),
    WithJsonSchema({"type": ["string", "number"], "examples": ["30s", "5m", "1h30m", "1d"]}),
]

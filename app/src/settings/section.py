"""The base of every section of the settings, and durations such as "30s", "5m" and "1h30m"."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

# A variable with the text `MANDT, MATNR` holds two names.
Split = BeforeValidator(
    lambda value: tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value
)
# The other way round: a list of names is one text.
Joined = BeforeValidator(
    lambda value: ",".join(map(str, value)) if isinstance(value, list | tuple) else value.replace(" ", "")
)
Columns = Annotated[tuple[str, ...], Split]


def setting(default: Any, description: str, **limits: Any) -> Any:
    """Return the pydantic field of a setting; default `...` makes it required. `limits`: as in pydantic's Field."""
    return Field(default=default, description=description, **limits)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)


LONGEST = 3650 * 86_400.0  # ten years, in seconds: a longer duration is a typing error
_NUMBER = r"(\d+(?:\.\d+)?)"
_PARTS = re.compile("".join(f"(?:{_NUMBER}{unit})?" for unit in "dhms"), re.ASCII)
_UNITS = (86_400, 3600, 60, 1)
_EXAMPLES = 'write it like "30s", "5m", "1h30m" or "1d"'


def seconds(value: Any) -> float:
    """Return a duration in seconds. A text has units d, h, m and s, each at most once, in this order; a number is in
    seconds. Raises ValueError."""
    word = "".join(str(value).split()).lower()
    match = _PARTS.fullmatch(f"{word}s" if re.fullmatch(_NUMBER, word, re.ASCII) else word)
    if isinstance(value, int | float) and not isinstance(value, bool):
        length = float(value)
    elif isinstance(value, str) and word and match is not None:
        parts = zip(match.groups(), _UNITS, strict=True)
        length = sum(float(number) * unit for number, unit in parts if number is not None)
    else:
        raise ValueError(f"{value!r} is not a duration: {_EXAMPLES}")
    if not 0 <= length <= LONGEST:  # also rejects NaN
        raise ValueError(f"a duration must be between 0 and {LONGEST / 86_400:.0f}d: {_EXAMPLES}")
    return length


# A duration in a settings model, stored in seconds.
Duration = Annotated[
    float,
    BeforeValidator(seconds),
    WithJsonSchema({"type": ["string", "number"], "examples": ["30s", "5m", "1h30m", "1d"]}),
]

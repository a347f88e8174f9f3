"""Lengths of time as people write them: "30s", "5m", "1h30m", "1d". Text in, seconds out."""

from __future__ import annotations

import re

_UNITS = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}
_FORM = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


def seconds(text: str) -> float:
    """Raises ValueError, saying how a length is written."""
    found = _FORM.fullmatch(text.strip().lower())
    if found is None or not any(found.groups()):
        raise ValueError(f'{text!r} is no length of time: write "30s", "5m", "1h30m" or "1d"')
    return sum(float(count) * unit for count, unit in zip(found.groups(), _UNITS.values(), strict=True) if count)

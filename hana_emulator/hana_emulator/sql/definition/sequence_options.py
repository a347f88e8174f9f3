"""The options of a sequence and of an identity column: START WITH, INCREMENT BY, MINVALUE, MAXVALUE, CYCLE, CACHE."""

from __future__ import annotations

from dataclasses import replace

from hana_emulator.errors import HanaError
from hana_emulator.sql.catalog.schema_objects import Sequence
from hana_emulator.sql.language.reader import TokenReader

# The limit for NO MAXVALUE of an ascending sequence; negated, for NO MINVALUE of a descending one
_GREATEST = 4_611_686_018_427_387_903

Change = dict[str, int | bool | None]


def options(reader: TokenReader) -> Change:
    """Read the clauses up to the end or a parenthesis; NO MAXVALUE and NO MINVALUE give None."""
    found: Change = {}
    while not (reader.at_end or reader.peek(")")):
        for words, key in _NUMBERS.items():
            if reader.take(*words):
                found[key] = reader.number()
                break
        else:
            plain = next((option for words, option in _PLAIN.items() if reader.take(*words)), None)
            if plain is None:
                raise reader.error("an option of a sequence")
            found[plain[0]] = plain[1]
    return found


_NUMBERS = {
    ("START", "WITH"): "start",
    ("RESTART", "WITH"): "restart",
    ("INCREMENT", "BY"): "increment",
    ("MAXVALUE",): "maximum",
    ("MINVALUE",): "minimum",
    ("CACHE",): "cache",
}
_PLAIN: dict[tuple[str, ...], tuple[str, int | bool | None]] = {
    ("NO", "MAXVALUE"): ("maximum", None),
    ("NO", "MINVALUE"): ("minimum", None),
    ("NO", "CACHE"): ("cache", 0),
    ("NO", "CYCLE"): ("cycles", False),
    ("CYCLE",): ("cycles", True),
}


def altered(base: Sequence, options: Change) -> Sequence:
    """`base` with the options applied and validated. Raises HanaError 313."""
    increment = int(options.get("increment", base.increment) or 0)
    rising = increment > 0
    options = {
        **options,
        "increment": increment,
        "maximum": _limit(options, "maximum", base.maximum, _GREATEST if rising else -1),
        "minimum": _limit(options, "minimum", base.minimum, 1 if rising else -_GREATEST),
    }
    sequence = replace(base, **options)  # type: ignore[arg-type]
    if not increment or sequence.minimum > sequence.maximum:
        raise HanaError(313, "invalid sequence: INCREMENT BY is 0, or MINVALUE greater than MAXVALUE")
    if not sequence.minimum <= sequence.start <= sequence.maximum:
        raise HanaError(313, "invalid sequence: START WITH lies outside MINVALUE and MAXVALUE")
    return sequence


def _limit(options: Change, key: str, known: int, without: int) -> int:
    if key not in options:
        return known
    value = options[key]
    return without if value is None else int(value)


def created(base: Sequence, options: Change) -> Sequence:
    """A new sequence with the options; without START WITH it starts at its minimum, or at its maximum if it falls."""
    rising = int(options.get("increment", 1) or 0) > 0
    limits: Change = {"maximum": None, "minimum": None, **options}
    first = _limit(limits, "minimum", 0, 1) if rising else _limit(limits, "maximum", 0, -1)
    return altered(base, {**limits, "start": options.get("start", first)})

"""CREATE, ALTER and DROP SEQUENCE."""

from __future__ import annotations

from dataclasses import replace

from hana_emulator.errors import HanaError, syntax_error
from hana_emulator.sql.catalog import schema_objects
from hana_emulator.sql.catalog.schema_objects import Sequence
from hana_emulator.sql.definition.workbench import Definition, Workbench
from hana_emulator.sql.language.names import encode, hana_identifier
from hana_emulator.sql.language.reader import Name, Parsers, TokenReader

# The limit for NO MAXVALUE of an ascending sequence; negated, for NO MINVALUE of a descending one
_GREATEST = 4_611_686_018_427_387_903

Change = dict[str, int | bool | None]


def _options(reader: TokenReader) -> Change:
    """Read the clauses; NO MAXVALUE and NO MINVALUE give None."""
    found: Change = {}
    while not reader.at_end:
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


def _defined(base: Sequence, options: Change) -> Sequence:
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


PARSERS: Parsers[Definition] = Parsers()


@PARSERS("CREATE", "SEQUENCE")
def _create(reader: TokenReader) -> Definition:
    name = reader.name()
    options = _options(reader)
    if "restart" in options:
        raise syntax_error("RESTART WITH belongs to ALTER SEQUENCE")

    def run(bench: Workbench) -> None:
        schema, label = bench.place(name)
        encode(label)
        if (schema, label) in bench.catalog.objects.sequences:
            raise HanaError(324, f"cannot use duplicate sequence name: {hana_identifier(label)}")
        rising = int(options.get("increment", 1) or 0) > 0
        limits: Change = {"maximum": None, "minimum": None, **options}
        first = _limit(limits, "minimum", 0, 1) if rising else _limit(limits, "maximum", 0, -1)
        base = Sequence(0, schema, label)
        sequence = _defined(base, {**limits, "start": options.get("start", first)})
        schema_objects.put_sequence(bench.connection, sequence)

    return run


@PARSERS("ALTER", "SEQUENCE")
def _alter(reader: TokenReader) -> Definition:
    name = reader.name()
    options = _options(reader)
    if "start" in options:
        raise syntax_error("START WITH belongs to CREATE SEQUENCE; ALTER SEQUENCE takes RESTART WITH")

    def run(bench: Workbench) -> None:
        sequence = _find(bench, name)
        changes = dict(options)
        if "restart" in changes:
            changes |= {"start": changes.pop("restart"), "version": sequence.version + 1}
        schema_objects.put_sequence(bench.connection, _defined(sequence, changes))

    return run


def _find(bench: Workbench, name: Name) -> Sequence:
    place = bench.place(name)
    found = bench.catalog.objects.sequences.get(place)
    if found is None:
        raise HanaError(313, f"invalid sequence: {hana_identifier(place[1])}")
    return found


@PARSERS("DROP", "SEQUENCE")
def _drop(reader: TokenReader) -> Definition:
    name = reader.name()
    _ = reader.take("CASCADE") or reader.take("RESTRICT")

    def run(bench: Workbench) -> None:
        bench.connection.execute("DELETE FROM owl_sequences WHERE id = ?", (_find(bench, name).id,))

    return run

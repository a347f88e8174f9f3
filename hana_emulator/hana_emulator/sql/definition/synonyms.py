"""CREATE and DROP [PUBLIC] SYNONYM: other names of tables and views. The target need not exist yet."""

from __future__ import annotations

from collections.abc import Callable

from hana_emulator.errors import HanaError
from hana_emulator.sql.catalog import schema_objects
from hana_emulator.sql.definition.workbench import Definition, Workbench, refuse_taken
from hana_emulator.sql.language.names import encode, hana_identifier
from hana_emulator.sql.language.reader import Name, TokenReader

_PUBLIC = "PUBLIC"


def _create(public: bool) -> Callable[[TokenReader], Definition]:
    def parser(reader: TokenReader) -> Definition:
        name = reader.name()
        reader.expect("FOR")
        target = reader.name()
        return lambda bench: _add(bench, name, target, public=public)

    return parser


def _add(bench: Workbench, name: Name, target: Name, *, public: bool) -> None:
    place = _place(bench, name, public=public)
    encode(name.name)
    if place in bench.catalog.objects.synonyms:
        raise HanaError(330, f"cannot use duplicate synonym name: {hana_identifier(name.name)}")
    if not public:
        refuse_taken(bench, *place)
    found = (target.schema or bench.schema, target.name)
    schema_objects.add_synonym(bench.connection, place, found, bench.user)


def _place(bench: Workbench, name: Name, *, public: bool) -> tuple[str, str]:
    return (_PUBLIC, name.name) if public else bench.place(name)


def _drop(public: bool) -> Callable[[TokenReader], Definition]:
    def parser(reader: TokenReader) -> Definition:
        name = reader.name()
        _ = reader.take("CASCADE") or reader.take("RESTRICT")
        return lambda bench: _remove(bench, name, public=public)

    return parser


def _remove(bench: Workbench, name: Name, *, public: bool) -> None:
    place = _place(bench, name, public=public)
    target = bench.catalog.objects.synonyms.get(place)
    if target is None or target[0] == "SYS":
        raise HanaError(315, f"invalid synonym: {hana_identifier(name.name)}")
    bench.connection.execute("DELETE FROM owl_synonyms WHERE schema = ? AND name = ?", place)


PARSERS: dict[tuple[str, ...], Callable[[TokenReader], Definition]] = {
    ("CREATE", "SYNONYM"): _create(False),
    ("CREATE", "PUBLIC", "SYNONYM"): _create(True),
    ("DROP", "SYNONYM"): _drop(False),
    ("DROP", "PUBLIC", "SYNONYM"): _drop(True),
}

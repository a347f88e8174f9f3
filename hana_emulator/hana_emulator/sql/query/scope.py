"""Name resolution in a statement: sources and their columns, common table expressions, outer queries.

Column references become SQLite text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hana_emulator.errors import HanaError, invalid_column
from hana_emulator.sql.catalog import row_ids
from hana_emulator.sql.catalog.catalog import Catalog
from hana_emulator.sql.catalog.rights import Touch
from hana_emulator.sql.language import limits
from hana_emulator.types import DEFAULT_PARAMETER, Column, HanaType, Parameter

if TYPE_CHECKING:
    from sqlglot import exp


@dataclass(frozen=True, slots=True)
class Bound:
    """The SQLite text of an expression and its HANA type (None for NULL and untyped parameters)."""

    sql: str
    type: HanaType | None
    nullable: bool = True
    column: Column | None = None
    parameter: int | None = None
    constant: bool = False  # True when it reads no column, so that it can be evaluated once

    def typed(self, kind: HanaType | None) -> Bound:
        return replace(self, type=kind)


@dataclass(frozen=True, slots=True)
class SourceColumn:
    """A column of a FROM entry: its HANA name and SQLite text."""

    column: Column
    sql: str

    def read(self, alias: str) -> str:
        """The SQLite text of the column in the source with this alias; without an alias, in the row itself."""
        return f"{alias}.{self.sql}" if alias else self.sql

    def optional(self) -> SourceColumn:
        return replace(self, column=replace(self.column, nullable=True))


@dataclass(frozen=True, slots=True)
class Source:
    """One FROM entry. `alias` is unique in the statement and never equals an encoded name."""

    alias: str
    name: str
    schema: str
    columns: tuple[SourceColumn, ...]
    row_id: SourceColumn | None = None  # The pseudo-column `"$rowid$"`, which `*` does not include
    table: str = ""  # Key of the stored table, if it returns each of its rows at most once, with its `_rowid_`
    # Whether references to its columns must be qualified by its name, as for the rows of a trigger
    qualified: bool = False

    def find(self, name: str) -> SourceColumn | None:
        found = [entry for entry in self.columns if entry.column.name == name]
        if len(found) > 1:
            raise HanaError(268, f"column ambiguously defined: {name}")
        if not found and self.row_id is not None and name == row_ids.NAME:
            return self.row_id
        return found[0] if found else None

    @property
    def readable(self) -> tuple[SourceColumn, ...]:
        return self.columns if self.row_id is None else (*self.columns, self.row_id)

    def answers_to(self, table: str, schema: str) -> bool:
        return self.name == table and (not schema or self.schema == schema)

    def outer(self) -> Source:
        """The source with all columns nullable, as the optional side of an outer join."""
        columns = tuple(entry.optional() for entry in self.columns)
        row_id = self.row_id.optional() if self.row_id is not None else None
        return replace(self, columns=columns, row_id=row_id, table="")


@dataclass(frozen=True, slots=True)
class CommonTable:
    """A WITH entry: its SQLite name and its columns, named c1, c2, ... in SQLite."""

    alias: str
    columns: tuple[Column, ...]
    sources: int = 1  # Number of tables, views and subqueries it reads, including those of WITH entries it reads


@dataclass(slots=True)
class Scope:
    parent: Scope | None = None
    sources: list[Source] = field(default_factory=list)
    common: dict[str, CommonTable] = field(default_factory=dict)
    outputs: dict[str, Bound] = field(default_factory=dict)  # Select aliases, readable in ORDER BY only
    aggregates: bool = False  # Set when an aggregate function is bound here
    # The SQLite text of every node bound here, by the node's id; used to check GROUP BY
    trace: dict[int, str] = field(default_factory=dict)

    def common_table(self, name: str) -> CommonTable | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.common:
                return scope.common[name]
            scope = scope.parent
        return None

    def resolve(self, name: str, table: str = "", schema: str = "") -> Bound:
        """Find a column. Raises HanaError 260 if no source has it, 268 if more than one does."""
        scope: Scope | None = self
        while scope is not None:
            found: list[tuple[Source, SourceColumn]] = []
            for source in scope.sources:
                if (table or source.qualified) and not source.answers_to(table, schema):
                    continue
                entry = source.find(name)
                if entry is not None:
                    found.append((source, entry))
            if len(found) > 1:
                raise HanaError(268, f"column ambiguously defined: {name}")
            for source, entry in found:
                return Bound(entry.read(source.alias), entry.column.type, entry.column.nullable, entry.column)
            scope = scope.parent
        if not table and name in self.outputs:
            return self.outputs[name]
        raise invalid_column(f"{table}.{name}" if table else name)

    def matching(self, table: str, schema: str = "") -> list[Source]:
        found = [source for source in self.sources if not table or source.answers_to(table, schema)]
        if not found:
            raise invalid_column(f"{table}.*" if table else "*")
        return found


@dataclass(frozen=True, slots=True)
class BoundQuery:
    """A query ready for SQLite; its output columns are named c1, c2, ..."""

    sql: str
    columns: tuple[Column, ...]


@dataclass(slots=True)
class Binding:
    """The state of binding one statement: the catalogue it sees and the parameter types found so far."""

    catalog: Catalog
    schema: str
    bind_query: Callable[[Binding, exp.Expr, Scope | None], BoundQuery]
    parameters: dict[int, Parameter] = field(default_factory=dict)
    # The privileges that the statement needs; a view is one object, and its tables need no privileges
    touches: set[Touch] = field(default_factory=set)
    word_indexes: set[str] = field(default_factory=set)  # Tables whose word indexes the statement searches
    view_depth: int = 0
    # In a trigger's body: the scope of the rows that fired it. SQLite then allows no alias for a table that is written.
    outer: Scope | None = None
    # Number of sources so far; those of a WITH entry count each time it is read, because SQLite reads them again
    sources: int = 0
    _aliases: int = 0

    def count(self, sources: int) -> None:
        """Add to the number of sources. Raises HanaError 2048 for too many."""
        self.sources += sources
        limits.check_sources(self.sources)

    def alias(self, prefix: str = "t") -> str:
        self.count(1)
        self._aliases += 1
        return f"{prefix}{self._aliases}"

    def parameter(self, number: int, kind: HanaType | None, name: str = "") -> None:
        """Declare the type of the `number`-th `?`; the first known type is kept."""
        if number not in self.parameters or kind is not None:
            self.parameters[number] = Parameter(kind or DEFAULT_PARAMETER, name)

    def declared(self, count: int) -> tuple[Parameter, ...]:
        default = Parameter(DEFAULT_PARAMETER)
        return tuple(self.parameters.get(number, default) for number in range(1, count + 1))


def typed_parameter(binding: Binding, bound: Bound, kind: HanaType | None, name: str = "") -> Bound:
    if bound.parameter is None or bound.type is not None or kind is None:
        return bound
    binding.parameter(bound.parameter, kind, name)
    return bound.typed(kind)

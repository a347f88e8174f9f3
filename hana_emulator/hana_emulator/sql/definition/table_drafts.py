"""The part between the parentheses of CREATE TABLE and ALTER TABLE: columns and constraints as written."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from hana_emulator.errors import HanaError
from hana_emulator.sql.catalog.catalog import Constraint, TableColumn
from hana_emulator.sql.catalog.schema_objects import Check, Sequence
from hana_emulator.sql.definition.sequence_options import Change, created, options
from hana_emulator.sql.language.names import encode
from hana_emulator.sql.language.reader import Name, TokenReader
from hana_emulator.types import INTEGERS, LOBS, TypeCode

_COLUMN_OPTIONS = frozenset(
    {"NOT", "NULL", "DEFAULT", "PRIMARY", "UNIQUE", "GENERATED", "AS", "COMMENT", "REFERENCES", "CHECK", "CONSTRAINT"}
)
# HANA Cloud stores these as their Unicode types (sqlalchemy-hana's tests of reflected types expect it)
_UNICODE = {TypeCode.VARCHAR: TypeCode.NVARCHAR, TypeCode.CHAR: TypeCode.NCHAR, TypeCode.CLOB: TypeCode.NCLOB}
_ACTIONS = {
    ("CASCADE",): "CASCADE",
    ("RESTRICT",): "RESTRICT",
    ("SET", "NULL"): "SET NULL",
    ("SET", "DEFAULT"): "SET DEFAULT",
}


@dataclass(frozen=True, slots=True)
class ReferenceDraft:
    """A foreign key as written; without `parent_columns` it refers to the parent's primary key."""

    name: str
    columns: tuple[str, ...]
    parent: Name
    parent_columns: tuple[str, ...]
    on_delete: str
    on_update: str


@dataclass(slots=True)
class TableDraft:
    """Columns and constraints as written; an unnamed constraint has the name ''."""

    columns: list[TableColumn] = field(default_factory=list)
    constraints: list[Constraint] = field(default_factory=list)
    references: list[ReferenceDraft] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    nullability: dict[str, bool] = field(default_factory=dict)  # By column: True for NULL, False for NOT NULL
    identity: Sequence | None = None  # The numbers of the identity column, as a sequence without a name

    def constrain(self, columns: Collection[str], *, primary: bool, name: str = "") -> None:
        if primary and any(constraint.primary_key for constraint in self.constraints):
            raise HanaError(294, "cannot have more than one primary key")
        self.constraints.append(Constraint(name, tuple(columns), primary))


def table_body(reader: TokenReader) -> TableDraft:
    """( column or constraint, ... )"""
    draft = TableDraft()
    reader.expect("(")
    while True:
        if not table_constraint(reader, draft):
            draft.columns.append(_column(reader, draft))
        if not reader.take(","):
            break
    reader.expect(")")
    return draft


def table_constraint(reader: TokenReader, draft: TableDraft) -> bool:
    """Read a table constraint into `draft`; False if none follows."""
    name = reader.identifier() if reader.take("CONSTRAINT") else ""
    if reader.take("PRIMARY", "KEY"):
        draft.constrain(reader.identifiers(), primary=True, name=name)
    elif reader.peek("UNIQUE", "(") and reader.take("UNIQUE"):
        draft.constrain(reader.identifiers(), primary=False, name=name)
    elif reader.take("FOREIGN", "KEY"):
        columns = reader.identifiers()
        reader.expect("REFERENCES")
        _references(reader, draft, columns, name)
    elif reader.peek("CHECK", "(") and reader.take("CHECK"):
        draft.checks.append(Check(name, reader.enclosed()))
    elif name:
        raise reader.error("PRIMARY KEY, UNIQUE, FOREIGN KEY or CHECK")
    else:
        return False
    return True


def _references(reader: TokenReader, draft: TableDraft, columns: Collection[str], name: str) -> None:
    """Read the part after REFERENCES."""
    parent = reader.name()
    parent_columns = reader.identifiers() if reader.peek("(") else []
    actions = {"DELETE": "RESTRICT", "UPDATE": "RESTRICT"}
    while reader.take("ON"):
        event = next((word for word in actions if reader.take(word)), None)
        action = next((action for words, action in _ACTIONS.items() if reader.take(*words)), None)
        if event is None or action is None:
            raise reader.error("ON DELETE or ON UPDATE with CASCADE, RESTRICT, SET NULL or SET DEFAULT")
        actions[event] = action
    draft.references.append(
        ReferenceDraft(name, tuple(columns), parent, tuple(parent_columns), actions["DELETE"], actions["UPDATE"])
    )


def _column(reader: TokenReader, draft: TableDraft) -> TableColumn:
    name, kind = reader.identifier(), reader.type()
    column = TableColumn(name, replace(kind, code=_UNICODE.get(kind.code, kind.code)))
    encode(column.name)
    while (changed := _column_option(reader, column, draft)) is not None:
        column = changed
    return column


def _column_option(reader: TokenReader, column: TableColumn, draft: TableDraft) -> TableColumn | None:
    if column.type.code in LOBS and reader.take("MEMORY", "THRESHOLD"):
        _ = reader.take("NULL") or reader.number()  # the bytes that HANA keeps in memory
        return column
    if reader.take("NOT", "NULL"):
        draft.nullability[column.name] = False
        return replace(column, nullable=False)
    if reader.take("NULL"):
        draft.nullability[column.name] = True
        return column
    if reader.take("DEFAULT"):
        return replace(column, default=reader.expression_text(_COLUMN_OPTIONS))
    if reader.take("COMMENT"):
        return replace(column, comment=reader.string())
    if reader.peek("GENERATED") or reader.peek("AS"):
        return _generated(reader, column, draft)
    name = reader.identifier() if reader.take("CONSTRAINT") else ""
    if reader.take("PRIMARY", "KEY"):
        draft.constrain([column.name], primary=True, name=name)
        return replace(column, nullable=False)
    if reader.take("UNIQUE"):
        draft.constrain([column.name], primary=False, name=name)
    elif reader.take("REFERENCES"):
        _references(reader, draft, [column.name], name)
    elif reader.peek("CHECK", "(") and reader.take("CHECK"):
        draft.checks.append(Check(name, reader.enclosed()))
    elif name:
        raise reader.error("PRIMARY KEY, UNIQUE, REFERENCES or CHECK")
    else:
        return None
    return column


def _generated(reader: TokenReader, column: TableColumn, draft: TableDraft) -> TableColumn:
    """Read AS expression, GENERATED ALWAYS AS expression, or GENERATED ... AS IDENTITY."""
    if reader.take("AS"):
        return replace(column, formula=reader.expression_text(_COLUMN_OPTIONS), virtual=True)
    reader.expect("GENERATED")
    kind = "ALWAYS" if reader.take("ALWAYS") else "BY DEFAULT"
    if kind == "BY DEFAULT":
        reader.expect("BY", "DEFAULT")
    reader.expect("AS")
    if not reader.take("IDENTITY"):
        if kind == "BY DEFAULT":
            raise reader.error("IDENTITY")
        return replace(column, formula=reader.expression_text(_COLUMN_OPTIONS))
    chosen: Change = {}
    if reader.take("("):
        chosen = options(reader)
        reader.expect(")")
    if column.type.code not in INTEGERS:
        raise HanaError(264, f"invalid datatype: an identity column must be of an integer type, {column.name} is not")
    draft.identity = created(Sequence(0, "", ""), chosen)
    return replace(column, identity=kind)

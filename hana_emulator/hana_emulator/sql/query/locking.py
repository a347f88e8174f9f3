"""Parse SELECT ... FOR UPDATE and find the rows that a bound SELECT must lock. Takes no locks itself.

Source: SAP HANA SQL Reference Guide, SELECT: FOR UPDATE [OF columns] [NOWAIT | WAIT seconds] [IGNORE LOCKED].
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sqlglot.tokenizer_core import Token, TokenType

from hana_emulator.errors import invalid_column, not_supported
from hana_emulator.seam import Storage
from hana_emulator.sql.language.reader import TokenReader, is_word
from hana_emulator.sql.query.queries import SelectParts
from hana_emulator.sql.query.scope import Bound

_TABLE = re.compile(r'"(~(?:[^"]|"")*)" AS (\w+)')
_ROWID = "_rowid_"
ResultRow = tuple[Storage, ...]


@dataclass(frozen=True, slots=True)
class LockClause:
    """FOR UPDATE as written: the dotted names after OF, and `patience` in seconds (None: the session's default)."""

    columns: tuple[tuple[str, ...], ...] = ()
    patience: float | None = None
    skips_locked: bool = False


@dataclass(frozen=True, slots=True)
class RowLocks:
    """The tables to lock. The last columns of a result row are rowids, one for each table, in the same order."""

    clause: LockClause
    tables: tuple[str, ...]

    def split(self, row: ResultRow) -> tuple[ResultRow, list[tuple[str, int]]]:
        """The row without rowids, and (table, rowid) of each row to lock; an outer join may have no row of a table."""
        end = len(row) - len(self.tables)
        behind = zip(self.tables, row[end:], strict=True)
        return row[:end], [(table, rowid) for table, rowid in behind if isinstance(rowid, int)]


def split_clause(sql: str, tokens: Sequence[Token]) -> tuple[list[Token], LockClause | None]:
    """Split FOR UPDATE off the statement. Raises HanaError 257, or 7 for FOR SHARE LOCK."""
    depth = 0
    for place, token in enumerate(tokens):
        depth += (token.token_type is TokenType.L_PAREN) - (token.token_type is TokenType.R_PAREN)
        if depth == 0 and is_word(token, "FOR") and place + 1 < len(tokens):
            if is_word(tokens[place + 1], "SHARE"):
                raise not_supported("FOR SHARE LOCK")
            if is_word(tokens[place + 1], "UPDATE"):
                reader = TokenReader(sql, list(tokens[place + 2 :]))
                columns: list[tuple[str, ...]] = []
                if reader.take("OF"):
                    columns = [tuple(parts) for parts in reader.several(reader.dotted)]
                patience: float | None = None
                if reader.take("NOWAIT"):
                    patience = 0.0
                elif reader.take("WAIT"):
                    patience = float(reader.number())
                clause = LockClause(tuple(columns), patience, reader.take("IGNORE", "LOCKED"))
                if not reader.peek("WITH", "HINT"):
                    reader.end()
                return list(tokens[:place]), clause
    return list(tokens), None


def lock_rows_of(parts: SelectParts, clause: LockClause) -> RowLocks:
    """Add rowids to the select list of `parts`. Raises HanaError 7 if result rows are not table rows."""
    if parts.distinct or parts.groups or parts.scope.aggregates:
        raise not_supported("FOR UPDATE of DISTINCT, GROUP BY or aggregates")
    by_alias = {alias: table.replace('""', '"') for table, alias in _TABLE.findall(parts.source)}
    wanted = [source for source in parts.scope.sources if source.alias in by_alias]
    if len(wanted) < sum(source.schema != "SYS" for source in parts.scope.sources):
        raise not_supported("FOR UPDATE of views and derived tables")
    named = set()
    for names in clause.columns:  # each is [table.]column or a table name
        column, table = names[-1], names[-2] if len(names) > 1 else ""
        owners = [
            source.alias
            for source in wanted
            if (table in ("", source.name) and any(entry.column.name == column for entry in source.columns))
            or (not table and source.name == column)
        ]
        if not owners:
            raise invalid_column(".".join(names))
        named.add(owners[0])
    if clause.columns:
        wanted = [source for source in wanted if source.alias in named]
    for source in wanted:
        if any(entry.column.name == _ROWID.upper() for entry in source.columns):
            raise not_supported(f"FOR UPDATE of a table with a column {_ROWID.upper()}")
        parts.items.append(Bound(f"{source.alias}.{_ROWID}", None))
    return RowLocks(clause, tuple(by_alias[source.alias] for source in wanted))

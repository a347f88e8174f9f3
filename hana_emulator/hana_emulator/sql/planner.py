"""Plan a statement from its text, so that a session can run it repeatedly. Reads the catalogue but no data."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from sqlglot import exp
from sqlglot.tokenizer_core import Token, TokenType

from hana_emulator.errors import HanaError, not_supported, syntax_error
from hana_emulator.seam import FunctionCode, Statement
from hana_emulator.sql import blocks, explain
from hana_emulator.sql.catalog.catalog import Catalog
from hana_emulator.sql.catalog.rights import Touch
from hana_emulator.sql.control import Control, parse_control
from hana_emulator.sql.definition import definitions
from hana_emulator.sql.definition.workbench import Definition
from hana_emulator.sql.language import dialect, limits
from hana_emulator.sql.language.reader import TokenReader, is_word
from hana_emulator.sql.query import locking, queries, search, writes
from hana_emulator.sql.query.expressions import unwrapped
from hana_emulator.sql.query.locking import RowLocks
from hana_emulator.sql.query.scope import Binding
from hana_emulator.sql.query.writes import Step, WritePlan, step
from hana_emulator.types import Column


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """A SELECT. `search`: a vectorised search that returns the same rows. `locks`: FOR UPDATE, which adds
    columns. `searched`: tables whose vectors or words are searched."""

    step: Step
    search: search.SearchPlan | None = None
    locks: RowLocks | None = None
    searched: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DefinitionPlan:
    definition: Definition


@dataclass(frozen=True, slots=True)
class ControlPlan:
    control: Control


Plan = QueryPlan | WritePlan | DefinitionPlan | ControlPlan


@dataclass(frozen=True, slots=True)
class Prepared(Statement):
    """A statement with its plan, valid for one version of the catalogue and one current schema."""

    plan: Plan | None = None
    version: int = -1
    schema: str = ""
    touches: frozenset[Touch] = frozenset()


def prepare(sql: str, catalog: Catalog, schema: str) -> Prepared:
    """Parse and plan `sql`. Raises HanaError 257, and name and type errors."""
    limits.check_text(sql)
    tokens = dialect.tokenize(sql)
    if not tokens:
        raise syntax_error("the statement is empty")
    if re.match(r"\{?\s*(\?\s*=\s*)?CALL\b", sql.lstrip(), re.IGNORECASE):
        raise HanaError(7, "feature not supported: CALL is not supported; the emulator has no procedures")
    reader = TokenReader(sql, tokens)
    control = parse_control(reader)
    if control is not None:
        return Prepared(sql, FunctionCode.NIL, plan=ControlPlan(control), version=catalog.version, schema=schema)
    definition = definitions.parse(reader)
    if definition is not None:
        return Prepared(sql, FunctionCode.DDL, plan=DefinitionPlan(definition), version=catalog.version, schema=schema)
    if reader.peek("DO"):
        done = prepare(blocks.as_statement(sql, catalog, schema), catalog, schema)
        return replace(done, sql=sql, function=FunctionCode.NIL)
    if reader.take("EXPLAIN", "PLAN"):
        return _explained(sql, reader, catalog, schema)
    return _Preparation(sql, tokens, Binding(catalog, schema, queries.bind_query)).run()


def _explained(sql: str, reader: TokenReader, catalog: Catalog, schema: str) -> Prepared:
    """Prepare the explained statement so that its errors are raised, but only write its plan."""
    name = None
    if reader.take("SET", "STATEMENT_NAME"):
        reader.expect("=")
        name = reader.string()
    reader.expect("FOR")
    if reader.peek("EXPLAIN"):
        raise HanaError(327, "cannot explain plan of given statement")
    if reader.peek("SQL", "PLAN", "CACHE", "ENTRY"):
        raise not_supported("EXPLAIN PLAN FOR SQL PLAN CACHE ENTRY")
    text = reader.rest()
    explained = prepare(text, catalog, schema)
    if not isinstance(explained.plan, QueryPlan | WritePlan):
        raise HanaError(327, "cannot explain plan of given statement")
    table = catalog.relation(*explain.PLACE)
    steps = explain.steps(catalog, schema, text, name)
    plan = WritePlan(FunctionCode.INSERT, table, steps)
    return Prepared(sql, FunctionCode.NIL, plan=plan, version=catalog.version, schema=schema, touches=explained.touches)


@dataclass(slots=True)
class _Preparation:
    sql: str
    tokens: list[Token]
    binding: Binding

    @property
    def parameter_count(self) -> int:
        return max(dialect.parameter_numbers(self.tokens), default=0)

    def run(self) -> Prepared:
        limits.check_parameters(self.parameter_count)
        first = self.tokens[0]
        if is_word(first, "UPSERT") or is_word(first, "REPLACE"):
            return self._written(self._upsert())
        if not any(is_word(first, word) for word in _FIRST_WORDS):
            raise _unknown_statement(first)
        kept, clause = locking.split_clause(self.sql, self.tokens)
        if not kept:
            raise _unknown_statement(first)
        node = dialect.parse(dialect.number_parameters(self.sql, kept))
        if isinstance(node, exp.Query):
            node = unwrapped(node)
            parts = queries.bind_select(self.binding, node, None) if isinstance(node, exp.Select) else None
            if parts is None:
                if clause is not None:
                    raise not_supported("FOR UPDATE of a set operation")
                query = queries.bind_query(self.binding, node, None)
                plan = QueryPlan(step(query.sql), searched=frozenset(self.binding.word_indexes))
                return self._prepared(FunctionCode.SELECT, plan, query.columns)
            if clause is not None:
                locks = locking.lock_rows_of(parts, clause)
                plan = QueryPlan(step(parts.render()), None, locks)
                return self._prepared(FunctionCode.SELECT_FOR_UPDATE, plan, tuple(parts.columns))
            text = parts.render()
            found = search.plan_search(self.binding, node, parts, self.parameter_count)
            searched = self.binding.word_indexes | ({found.key[0]} if found is not None else set())
            plan = QueryPlan(step(text), found, searched=frozenset(searched))
            return self._prepared(FunctionCode.SELECT, plan, tuple(parts.columns))
        if clause is not None:
            raise syntax_error("FOR UPDATE is allowed after a query only")
        binder = _WRITERS.get(type(node))
        if binder is None:
            raise _unknown_statement(first)
        return self._written(binder(self.binding, node))

    def _written(self, plan: WritePlan) -> Prepared:
        if is_word(self.tokens[0], "UPSERT") or is_word(self.tokens[0], "REPLACE"):
            privileges = {"INSERT", "UPDATE"}
        elif is_word(self.tokens[0], "MERGE"):
            privileges = {one.sql.split(" ", 1)[0] for one in plan.steps} | ({"INSERT"} if plan.collect else set())
        else:
            privileges = {plan.function.name}
        self.binding.touches |= {plan.table.touch(privilege) for privilege in privileges}
        return self._prepared(plan.function, plan, ())

    def _prepared(self, function: FunctionCode, plan: Plan, columns: tuple[Column, ...]) -> Prepared:
        if self.binding.parameters.keys() != dialect.parameter_numbers(self.tokens):
            raise syntax_error("a parameter is not allowed here")
        return Prepared(
            self.sql,
            function,
            self.binding.declared(self.parameter_count),
            columns,
            plan,
            self.binding.catalog.version,
            self.binding.schema,
            frozenset(self.binding.touches),
        )

    def _upsert(self) -> WritePlan:
        """Parse UPSERT as INSERT, after removing WITH PRIMARY KEY and WHERE, which sqlglot cannot read."""
        body, by_key = self.tokens[1:], False
        if [token.text.upper() for token in body[-3:]] == ["WITH", "PRIMARY", "KEY"]:
            body, by_key = body[:-3], True
        where = _where_after_values(body)
        condition = body[where + 1 :] if where is not None else []
        kept = body[:where] if where is not None else body
        if not kept:
            raise syntax_error("UPSERT needs a table and values")
        if where is not None and not condition:
            raise syntax_error("WHERE needs a condition")
        offset = self.tokens[0].end + 1
        text = _numbered(self.sql, kept, offset, 0)
        node = dialect.parse(f"INSERT INTO {text}")
        if not isinstance(node, exp.Insert):
            raise syntax_error("UPSERT needs a table and values")
        tree = None
        if condition:
            known = sum(token.text == "?" for token in kept if dialect.is_parameter(token))
            tree = dialect.parse_condition(_numbered(self.sql, condition, condition[0].start, known))
        return writes.bind_upsert(self.binding, node, tree, by_key)


def _unknown_statement(first: Token) -> HanaError:
    if any(is_word(first, word) for word in _KNOWN_TO_HANA):
        return not_supported(f"a statement of this form that begins with {first.text.upper()}")
    return syntax_error(f'incorrect syntax near "{first.text[:40]}"', first.start + 1)


def _numbered(sql: str, tokens: list[Token], start: int, known: int) -> str:
    """The text of `tokens` with parameters numbered from `known` + 1."""
    pieces, position = [], start
    for token in tokens:
        if dialect.is_parameter(token):
            known += token.text == "?"
            pieces += [sql[position : token.start], dialect.numbered_parameter(token, known)]
            position = token.end + 1
    return "".join([*pieces, sql[position : tokens[-1].end + 1]])


def _where_after_values(tokens: list[Token]) -> int | None:
    """The index of the WHERE after VALUES (...), or None; the WHERE of a query does not count."""
    depth, values = 0, False
    for index, token in enumerate(tokens):
        if token.token_type is TokenType.L_PAREN:
            depth += 1
        elif token.token_type is TokenType.R_PAREN:
            depth -= 1
        elif not depth and is_word(token, "VALUES"):
            values = True
        elif not depth and values and is_word(token, "WHERE"):
            return index
    return None


_FIRST_WORDS = ("SELECT", "WITH", "(", "INSERT", "UPDATE", "DELETE", "MERGE")
_KNOWN_TO_HANA = frozenset({"ALTER", "CALL", "CREATE", "DO", "DROP", "EXPLAIN", "EXPORT", "IMPORT", "SET"})
_WRITERS: dict[type[exp.Expr], Callable[[Binding, exp.Expr], WritePlan]] = {
    exp.Insert: writes.bind_insert,  # type: ignore[dict-item]
    exp.Update: writes.bind_update,  # type: ignore[dict-item]
    exp.Delete: writes.bind_delete,  # type: ignore[dict-item]
    exp.Merge: writes.bind_merge,  # type: ignore[dict-item]
}

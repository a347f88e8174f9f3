"""The context of a session's functions, and their registration with SQLite.

SQLite hides exceptions of user functions. `Context.error` keeps the last HanaError, so that the caller can raise it
after `sqlite3.OperationalError`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any

from hana_emulator.errors import HanaError, out_of_memory
from hana_emulator.nlp import Nlp
from hana_emulator.seam import Storage
from hana_emulator.sql.functions.builtin import fvecs, moments, numbers, texts
from hana_emulator.sql.functions.signatures import NAME, SCALARS, SIGNATURES, TEXT, TIME, Signature
from hana_emulator.sql.language.datatypes import nvarchar
from hana_emulator.sql.language.limits import MemoryWatch
from hana_emulator.types import BIGINT, DATE, INTEGER, TIMESTAMP, HanaType


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True)
class Context:
    user: str = "OWL"
    schema: str = "OWL"
    connection_id: int = 0
    isolation_level: str = "READ COMMITTED"
    clock: Callable[[], datetime] = utc_now
    last_identity: int | None = None
    error: HanaError | None = None
    # The time that CURRENT_TIMESTAMP and similar functions return; None: the clock's time at each call
    statement_time: moments.Moment | None = None
    session_variables: dict[str, str] = field(default_factory=dict)
    current_numbers: dict[int, int] = field(default_factory=dict)  # CURRVAL of each sequence, by its id
    memory: MemoryWatch = field(default_factory=MemoryWatch)

    def begin_statement(self) -> None:
        """Clear the last error and fix the time: as in HANA, CURRENT_TIMESTAMP is constant within a statement."""
        self.error = None
        self.memory.begin_statement()
        self.statement_time = moments.now(self.clock)

    def now(self) -> moments.Moment:
        return self.statement_time or moments.now(self.clock)


_SESSION: dict[str, Callable[[Context], Any]] = {}


def _define_session(names: str, read: Callable[[Context], Any], result: HanaType) -> None:
    for name in names.split():
        SIGNATURES[name] = Signature(f"hana_{name.lower()}", (), result)
        _SESSION[f"hana_{name.lower()}"] = read


_define_session("CURRENT_USER SESSION_USER", lambda context: context.user, NAME)
_define_session("CURRENT_SCHEMA", lambda context: context.schema, NAME)
_define_session("CURRENT_CONNECTION", lambda context: context.connection_id, INTEGER)
_define_session("CURRENT_IDENTITY_VALUE", lambda context: context.last_identity, BIGINT)
_define_session("CURRENT_TRANSACTION_ISOLATION_LEVEL", lambda context: context.isolation_level, NAME)
_define_session("CURRENT_DATE CURRENT_UTCDATE", lambda context: context.now().date(), DATE)
_define_session("CURRENT_TIME CURRENT_UTCTIME", lambda context: context.now().time(), TIME)
_timestamp = lru_cache(maxsize=64)(moments.Moment.timestamp)  # one statement asks for it once per row
_define_session("CURRENT_TIMESTAMP CURRENT_UTCTIMESTAMP NOW", lambda context: _timestamp(context.now()), TIMESTAMP)
SIGNATURES["SESSION_CONTEXT"] = Signature("hana_session_context", (TEXT,), nvarchar(512))

SESSION_VARIABLES = "owl_session_variables"  # SQLite function: the session's variables as a JSON object


# ------------------------------------------------------------------------------------------------------- registration


def register(connection: sqlite3.Connection, context: Context, nlp: Nlp) -> None:
    """Register all functions with `connection`; their names begin with `hana_`."""

    def embed(text: str | None, *arguments: str | None) -> bytes | None:
        return None if text is None else fvecs.encode(nlp.embed(text, *arguments))

    def score(document: str | None, query: str | None, model: str | None) -> float | None:
        return None if document is None or query is None else nlp.score(document, query, model)

    connection.create_function("hana_vector_embedding", -1, _guarded(embed, context), deterministic=True)
    connection.create_function("hana_cross_encode", 3, _guarded(score, context), deterministic=True)
    for name, scalar in SCALARS.items():
        guarded = _guarded(scalar.compute, context, strict=scalar.strict)
        connection.create_function(name, -1, guarded, deterministic=scalar.pure)
    for name, read in _SESSION.items():
        connection.create_function(name, 0, _guarded(partial(read, context), context))
    connection.create_function("hana_session_context", 1, context.session_variables.get)
    connection.create_function(SESSION_VARIABLES, 0, lambda: json.dumps(context.session_variables))


def _guarded(compute: Callable[..., Any], context: Context, *, strict: bool = False) -> Callable[..., Storage]:
    """`strict`: NULL in, NULL out."""

    def call(*arguments: Storage) -> Storage:
        if strict and None in arguments:
            return None
        try:
            # An unpaired surrogate becomes U+FFFD; an integer beyond 64 bits raises 314.
            value = compute(*arguments)
            if isinstance(value, bool):
                return int(value)
            if isinstance(value, str):
                return texts.whole(value)
            if isinstance(value, Decimal):
                return numbers.decimal_text(value)
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise numbers.overflow("BIGINT")
            return value  # type: ignore[no-any-return]
        except Exception as error:
            context.error = _as_hana_error(error)
            raise

    return call


def _as_hana_error(error: Exception) -> HanaError:
    """Map arithmetic and argument count errors to HANA's codes. The text never contains values."""
    if isinstance(error, HanaError):
        return error
    if isinstance(error, ZeroDivisionError):
        return numbers.division_by_zero()
    if isinstance(error, ArithmeticError):
        return numbers.overflow("result out of range")
    if isinstance(error, MemoryError):
        return out_of_memory("a function of this emulator takes too much")
    if isinstance(error, RecursionError):
        return HanaError(306, "invalid argument: a value is nested too deeply")
    if isinstance(error, TypeError):
        return HanaError(266, "inconsistent datatype: a function does not take arguments of this number or kind")
    return HanaError(2, f"general error: {type(error).__name__} in a function of the emulator")

"""The protocols of a source, an embedder and an observer. Those of a store are in `stores/store.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from connector.model import (
    Column,
    Key,
    KeyRange,
    LogEntry,
    Passed,
    Query,
    Row,
    RowIds,
    Span,
    Table,
    TableRef,
    Token,
    Vectors,
)


class Source(Protocol):
    """Where rows come from."""

    def describe(self, ref: TableRef) -> Table:
        """Return the table or view. Raises UnknownTable with the nearest names."""
        ...

    def count(self, query: Query) -> int: ...

    def pages(self, query: Query, size: int, within: KeyRange | None = None) -> Iterator[list[Row]]:
        """Yield every row once in key order, `size` at a time. No cursor or transaction is open between pages."""
        ...

    def ranges(self, query: Query, parts: int, rows: int) -> list[KeyRange]:
        """Return at most `parts` ranges of about equally many of the `rows` rows. Every possible key is in exactly
        one."""
        ...

    def rows(self, query: Query, keys: Sequence[Key]) -> list[Row]:
        """Return the existing rows of `keys`, in any order."""
        ...

    def now(self) -> datetime:
        """UTC, by the clock of the database."""
        ...

    @property
    def capture(self) -> Capture:
        """How it reports changes; used only by the change methods that need it."""
        ...


class Capture(Protocol):
    """How a source reports changes. Raises ConfigurationError, with the reason, where the source cannot."""

    def table_id(self, table: TableRef) -> int | None:
        """Return an id that changes when the table is dropped and created again; None for a view."""
        ...

    def window(self, query: Query, span: Span, size: int) -> Iterator[Passed]:
        """Yield the rows of a span as `Source.pages` does, `size` at a time."""
        ...

    def highest(self, query: Query, column: Column) -> str | None:
        """Return the highest value of a watermark column; None for an empty table."""
        ...

    def tokens(self, query: Query, token: Token, size: int, *, values: bool = False) -> Iterator[list[Row]]:
        """Yield every row once in key order with its token, and with its values only where `values`."""
        ...

    def rows_with_tokens(self, query: Query, token: Token, keys: Sequence[Key]) -> list[Row]:
        """As `Source.rows`, each with the token of exactly the returned content."""
        ...

    def row_ids(self, query: Query) -> RowIds:
        """Return the row ids of the whole table, without `where`."""
        ...

    def check_log(self, query: Query, log: TableRef) -> None:
        """Raise LogMissing when the log, or a trigger that fills it, is missing or disabled."""
        ...

    def log_length(self, log: TableRef) -> int: ...

    def log_entries(self, query: Query, log: TableRef, after: int, size: int) -> list[LogEntry]:
        """Return the first `size` entries with an id above `after`, by id."""
        ...

    def forget(self, log: TableRef, ids: Sequence[int]) -> None:
        """Delete exactly these entries; missing ones are ignored."""
        ...


class Embedder(Protocol):
    """Turns texts into unit vectors in the same order."""

    dimension: int
    model: str
    """Name for people, MODEL_ID and status."""
    fingerprint: str
    """Changes whenever vectors would: model, weights, pooling, precision family."""
    max_tokens: int
    """Longest text in tokens, without special tokens."""

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """Raises TextsNotEmbeddable, which names the texts; the others are unaffected."""
        ...

    def embed_counted(self, texts: Sequence[str]) -> tuple[Vectors, list[int]]:
        """As `embed_documents`, with the token count of each text; they are tokenised once for both."""
        ...

    def embed_query(self, text: str) -> NDArray[np.float32]: ...

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Without special tokens."""
        ...

    def split(self, text: str, max_tokens: int, overlap: int) -> list[str]:
        """Return pieces of at most `max_tokens` tokens that overlap by up to `overlap` tokens, cut at word borders
        where possible. They are exact substrings of `text` that together cover it."""
        ...


class Observer(Protocol):
    """Receives events while a sync runs. Must return at once and never raise."""

    def stage(self, name: str, seconds: float, items: int) -> None:
        """A stage (`read render tokenize embed apply`) was busy for `seconds` over `items` rows or texts."""
        ...

    def progress(self, done: int, total: int) -> None:
        """Rows handled so far."""
        ...

    def event(self, name: str, **fields: str | int | float) -> None:
        """`waiting`: another worker holds the collection; `owned`: it is ours after such a wait."""
        ...

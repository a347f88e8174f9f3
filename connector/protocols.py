"""What a source, a store, an embedder and an observer must do: the protocols by which the parts know each other. Knows
the vocabulary of `model.py` and NumPy, nothing else.
"""

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
        """The table or view. Raises UnknownTable with the nearest names."""
        ...

    def count(self, query: Query) -> int: ...

    def pages(self, query: Query, size: int, within: KeyRange | None = None) -> Iterator[list[Row]]:
        """Every row once, in key order, `size` at a time; no cursor and no transaction is open between pages."""
        ...

    def ranges(self, query: Query, parts: int, rows: int) -> list[KeyRange]:
        """The keys cut into at most `parts` ranges of about as many of the `rows` rows each; together they hold every
        key there may ever be, and none twice."""
        ...

    def rows(self, query: Query, keys: Sequence[Key]) -> list[Row]:
        """The rows that exist among `keys`, any order."""
        ...

    def now(self) -> datetime:
        """UTC, by the clock of the database."""
        ...

    @property
    def capture(self) -> Capture:
        """What it can say of its changes; asked only by the methods that need it."""
        ...


class Capture(Protocol):
    """What a source can say of its changes. A source that cannot do it raises ConfigurationError, saying why."""

    def table_id(self, table: TableRef) -> int | None:
        """Another one once the table was dropped and made anew; None for a view."""
        ...

    def window(self, query: Query, span: Span, size: int) -> Iterator[Passed]:
        """The rows of a span, each with exactly what `Source.pages` gives of it, `size` at a time."""
        ...

    def highest(self, query: Query, column: Column) -> str | None:
        """The highest value of a watermark column; None when there is none."""
        ...

    def tokens(self, query: Query, token: Token, size: int, *, values: bool = False) -> Iterator[list[Row]]:
        """Every row once, in key order, with its token; without `values` that is all, and the rows hold none."""
        ...

    def rows_with_tokens(self, query: Query, token: Token, keys: Sequence[Key]) -> list[Row]:
        """As `Source.rows`, each with the token of the very content that it is given with."""
        ...

    def row_ids(self, query: Query) -> RowIds:
        """For the table as a whole, whatever `where` says."""
        ...

    def check_log(self, query: Query, log: TableRef) -> None:
        """Raises LogMissing when the log, or a trigger that fills it, is not there or not at work."""
        ...

    def log_length(self, log: TableRef) -> int: ...

    def log_entries(self, query: Query, log: TableRef, after: int, size: int) -> list[LogEntry]:
        """The first `size` entries with an id above `after`, in order of their ids."""
        ...

    def forget(self, log: TableRef, ids: Sequence[int]) -> None:
        """Delete exactly these entries; those that are gone already do not matter."""
        ...


class Embedder(Protocol):
    """Texts in, unit vectors out, same order."""

    dimension: int
    model: str
    """Human name, for MODEL_ID and status."""
    fingerprint: str
    """Changes whenever vectors would: model, weights, pooling, precision family."""
    max_tokens: int
    """Longest text in tokens, without special tokens."""

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """Raises TextsNotEmbeddable, naming the texts; everything else about the batch is unaffected."""
        ...

    def embed_counted(self, texts: Sequence[str]) -> tuple[Vectors, list[int]]:
        """As `embed_documents`, with what `count_tokens` says of each text: they are tokenised once for both."""
        ...

    def embed_query(self, text: str) -> NDArray[np.float32]: ...

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Without special tokens."""
        ...

    def split(self, text: str, max_tokens: int, overlap: int) -> list[str]:
        """Pieces of at most `max_tokens` tokens, each starting up to `overlap` tokens before the end of the one before
        it, cut at word borders where that is possible; exact substrings of `text` that together cover it."""
        ...


class Observer(Protocol):
    """Told of events while a sync runs; must return at once and never raise."""

    def stage(self, name: str, seconds: float, items: int) -> None:
        """A stage (`read render tokenize embed apply`) was busy for `seconds` over `items` rows or texts."""
        ...

    def progress(self, done: int, total: int) -> None:
        """Rows handled so far."""
        ...

    def event(self, name: str, **fields: str | int | float) -> None:
        """`waiting`: another worker holds the collection; `owned`: it is ours after such a wait."""
        ...

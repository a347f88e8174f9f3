"""The protocols of a source, an embedder and an observer. Those of a store are in `stores/store.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from connector.model import (
    Column,
    DatabaseModel,
    Key,
    KeyRange,
    Query,
    Row,
    Span,
    Table,
    TableRef,
    Token,
    Value,
    Vectors,
)


class Source(Protocol):
    """A source of rows."""

    def describe(self, ref: TableRef) -> Table:
        """Return the table or view. Raises UnknownTable with the nearest names."""
        ...

    def count(self, query: Query) -> int: ...

    def pages(self, query: Query, size: int, within: KeyRange | None = None) -> Iterator[Sequence[Row]]:
        """Yield every row once in key order, `size` at a time. No cursor or transaction is open between pages."""
        ...

    def ranges(self, query: Query, parts: int, rows: int) -> list[KeyRange]:
        """Return at most `parts` key ranges of roughly equal size out of `rows` rows. Every possible key is in exactly
        one range."""
        ...

    def rows(self, query: Query, keys: Sequence[Key]) -> list[Row]:
        """Return the existing rows of `keys`, unordered."""
        ...

    def now(self) -> datetime:
        """Return the database's time, UTC."""
        ...

    @property
    def capture(self) -> Capture:
        """Return how the source reports changes; used only by change methods that need it."""
        ...


class Capture(Protocol):
    """How a source reports changes. Raises ConfigurationError with the reason if it cannot."""

    def table_id(self, table: TableRef) -> int | None:
        """Return an id that changes if the table or view is dropped and recreated; None if it has none."""
        ...

    def window(self, query: Query, span: Span, size: int, *, repeated: bool = False) -> Iterator[tuple[list[Row], str]]:
        """Yield the rows of a span in order of (watermark, key), `size` at a time, each page with the watermark of its
        last row. Raises NoKey if two rows have the same watermark and key, unless `repeated`: then at least one of
        them is in a page."""
        ...

    def record_types(self, query: Query, span: Span) -> tuple[dict[Value, int], int]:
        """Return how many records of a span have which value in the last column of the key, and how many have NULL in
        another column of the key."""
        ...

    def highest(self, query: Query, column: Column, least: str | None) -> str | None:
        """Return the highest value of a watermark column from `least` on; None if there is none."""
        ...

    def tokens(self, query: Query, token: Token, size: int, *, values: bool = False) -> Iterator[list[Row]]:
        """Yield every row once in key order with its token, and with its values if `values`."""
        ...

    def rows_with_tokens(self, query: Query, token: Token, keys: Sequence[Key]) -> list[Row]:
        """Return rows like `Source.rows`, each with the token of exactly the returned content."""
        ...

    def row_ids(self, query: Query) -> tuple[int, int]:
        """Return the highest `"$rowid$"` (0 when empty) and the row count of a column table, without `where`."""
        ...

    def check_log(self, query: Query, log: TableRef) -> None:
        """Raise LogMissing if the log, or a trigger that fills it, is missing or disabled."""
        ...

    def log_length(self, log: TableRef) -> int: ...

    def log_entries(self, query: Query, log: TableRef, after: int, size: int) -> list[tuple[int, Key]]:
        """Return the first `size` entries with an id above `after`, by id, each with the key of the row that was
        inserted, updated or deleted."""
        ...

    def forget(self, log: TableRef, ids: Sequence[int]) -> None:
        """Delete exactly these entries; ignores missing ones."""
        ...


class Embedder(Protocol):
    """Turns texts into unit vectors in the same order. A model may embed the same text differently as a document and as
    a query."""

    dimension: int
    model: str
    """Readable name, for MODEL_ID and status."""
    fingerprint: str
    """Changes whenever vectors change: model, weights, pooling, precision family, prompts."""
    max_tokens: int
    """The longest text in tokens, without special tokens and prompts."""
    least_cosine: float
    """The least cosine of two vectors of one text, computed in different batches or on different devices."""

    @property
    def database_model(self) -> DatabaseModel | None:
        """The model, if the database of the store computes it: then texts are embedded there when they are written,
        and no vector is fetched. None: the vectors come from here."""
        ...

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """Embed the texts. Raises TextsNotEmbeddable, which names the failing texts; the others are unaffected."""
        ...

    def embed_counted(self, texts: Sequence[str]) -> tuple[Vectors, list[int]]:
        """Embed like `embed_documents`, and return each text's token count; tokenises once."""
        ...

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """Embed a search text."""
        ...

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the token count of each text, without special tokens."""
        ...

    def split(self, text: str, max_tokens: int, overlap: int) -> list[str]:
        """Return pieces of at most `max_tokens` tokens that overlap by up to `overlap` tokens, cut at word borders if
        possible. They are exact substrings of `text` and together cover it."""
        ...


class Observer(Protocol):
    """Receives events while a sync runs. Methods must return at once and never raise."""

    def progress(self, done: int, total: int) -> None:
        """Report the rows handled so far."""
        ...

    def event(self, name: str) -> None:
        """Report an event. `waiting`: another worker holds the lease. `owned`: this worker has it after a wait."""
        ...

"""What a source, a store, an embedder and an observer must do: the protocols by which the parts know each other. Knows
the vocabulary of `model.py` and NumPy, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from connector.model import (
    ChangeSet,
    Checkpoint,
    CollectionStatus,
    Column,
    Filter,
    Generation,
    Hit,
    IndexUse,
    Key,
    KeyRange,
    Lease,
    LogEntry,
    Passed,
    QuarantinedRow,
    Query,
    Recipe,
    Row,
    RowIds,
    Sample,
    Span,
    StoredChunk,
    StoredRecord,
    StoredText,
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


class VectorStore(Protocol):
    """Where vectors live. Thread-safe. `collection` is the configured name.

    Writes need a `Lease`; every write transaction compares its epoch.
    """

    def open(self, collection: str, embedder: Embedder) -> Checkpoint:
        """Create what is missing. Raises ModelMismatch when the collection holds vectors of another model."""
        ...

    def lease(self, collection: str, owner: str, wait: float) -> AbstractContextManager[Lease]:
        """Own the collection for writing; renewed in the background, at most 30 s long after a crash.

        Waits up to `wait` seconds for another owner; raises LeaseLost when it does not let go.
        """
        ...

    def stored(self, collection: str) -> Iterator[list[StoredChunk]]:
        """All our chunks (foreign rows excluded), page by page, in no particular order."""
        ...

    def stored_of(self, collection: str, ids: Sequence[str]) -> list[StoredChunk]:
        """Our chunks of these documents, in no particular order."""
        ...

    def records(self, collection: str) -> Iterator[list[StoredRecord]]:
        """Everything in the table, foreign rows included, page by page."""
        ...

    def apply(self, lease: Lease, changes: ChangeSet) -> None:
        """One transaction. Raises RowRejected when the data is refused, LeaseLost when another worker took over.

        RowsRejected, where the store knows which, by positions in `chunks` and, behind them, `metadata_only`; a name
        may be wrong, and there may be more of them. Overloaded: the store may take a smaller change set.
        """
        ...

    def optimise(self, collection: str) -> None:
        """After a bulk load: build or refresh the search index. Cheap when there is nothing to do."""
        ...

    def search(
        self,
        collection: str,
        vector: NDArray[np.float32],
        k: int,
        where: Filter | None,
        generation: int | None = None,
        within: Filter | None = None,
    ) -> list[Hit]:
        """Best first; one hit per document (its best chunk); ties by id. Raises BadFilter, UnknownCollection, and
        GenerationChanged when another one than `generation` (None: any) serves now. `within` (None: all): the rows
        that the asker may see (`stores.filters.narrowed`); the others take no part, whatever `where` says, and whether
        `where` can be compared with their values does not show."""
        ...

    def keyword(
        self,
        collection: str,
        text: str,
        k: int,
        where: Filter | None,
        generation: int | None = None,
        within: Filter | None = None,
    ) -> list[Hit]:
        """As `search`, by the words of `text` (`stores/words.py`): whole words whatever their case, any of them, scored
        by BM25, so that rare words and short texts count more; how rare a word is counts over all rows, also those
        outside `within`. Scores compare within one answer only. None of `text` is query syntax. Raises
        ConfigurationError where the store cannot do it."""
        ...

    def vectors(self, collection: str, hits: Sequence[Hit | StoredText], generation: int | None = None) -> Vectors:
        """The stored vectors of the chunks that were found, in order; zeros for one that is gone meanwhile."""
        ...

    def exact(self, collection: str, vector: NDArray[np.float32], k: int, generation: int | None = None) -> list[Hit]:
        """As `search` over all rows, never by an approximate index: what an index is measured by."""
        ...

    def index_use(
        self,
        collection: str,
        k: int,
        where: Filter | None,
        generation: int | None = None,
        within: Filter | None = None,
    ) -> IndexUse:
        """Whether `search` with these arguments goes by an approximate index."""
        ...

    def keyed(
        self,
        collection: str,
        number: str,
        count: int,
        where: Filter | None,
        generation: int | None = None,
        within: Filter | None = None,
    ) -> list[Hit]:
        """The first chunk of up to `count` rows whose id holds `number` (letters and digits) anywhere, with score 0:
        those that have it as a value of their key (`words.as_key_value`) before those that only hold its digits, each
        by id. `where` and `within` as for `search`. Costs a look at every id. Raises as `search`."""
        ...

    def texts_of(
        self, collection: str, ids: Sequence[str], generation: int | None = None, within: Filter | None = None
    ) -> list[StoredText]:
        """Every chunk of the rows with these ids, as a `Hit` has them, by row in the order of `ids` (each once) and by
        number; of those outside `within` (as for `search`) and of those that are not there nothing. Any text may be
        asked for. Raises as `search`."""
        ...

    def sample(
        self,
        collection: str,
        count: int,
        generation: int | None = None,
        within: Filter | None = None,
        *,
        texts: bool = True,
    ) -> Sample:
        """Up to `count` of the rows, foreign ones too, from all over the collection: the same ones in the same order as
        long as nothing is written, and the first n of them are what a sample of n is. Without `texts` each text is
        "". Costs a look at every row's number, and at its metadata where there is a `within`. Raises as `search`."""
        ...

    def quarantine(self, collection: str) -> list[QuarantinedRow]: ...

    def status(self, collection: str) -> CollectionStatus | None:
        """None when the collection was never opened."""
        ...

    def generations(self, collection: str, counted: bool = True) -> list[Generation]:
        """All there are, by number; [] when the collection was never opened. Counting costs a look at every record."""
        ...

    def begin_generation(self, collection: str, embedder: Embedder, recipe: Recipe) -> str:
        """The name NAME@N of a generation to be built beside the active one, with vectors of `embedder`: the newest
        unfinished one of that model; else the newest retired one of that model and recipe, which is being built again;
        else a new, empty one. Raises UnknownCollection where none is active."""
        ...

    def record_recipe(self, collection: str, number: int, recipe: Recipe) -> None:
        """Remember what generation `number` is made by, serving or not. Nothing happens where there is none."""
        ...

    def switch(self, collection: str, number: int) -> None:
        """Generation `number` serves from now on, and the one that did is retired: one transaction. Who writes to
        either loses the lease. Nothing happens when it serves already. Raises UnknownGeneration."""
        ...

    def drop_generation(self, collection: str, number: int) -> None:
        """Delete one that does not serve, with all it holds; cut short, it stays as an unfinished one. Raises
        UnknownGeneration, GenerationRefused for the active one, LeaseLost while somebody writes to it."""
        ...

    def close(self) -> None: ...


class Ranking(Protocol):
    """The scores of one query over rows, known well enough to tell which may be the best. Not thread-safe."""

    def best(self, count: int) -> tuple[NDArray[np.int64], float]:
        """Rows, ascending, that hold every one whose true score may be among the best `count`, ties included; and a
        floor below 1: the true score of every row left out is below it (-inf: none is left out). True scores are dot
        products in exact arithmetic. May be asked again with another count."""
        ...


class ScanView(Protocol):
    """The rows of a `ScanCopy` at one moment. Never changes; any number of threads may use it."""

    def rank(self, queries: Vectors, allowed: NDArray[np.bool_] | None) -> list[Ranking]:
        """One pass over all rows for all `queries` (q, d), unit vectors. `allowed` (n,): the only rows that count."""
        ...

    def rank_rows(self, query: NDArray[np.float32], rows: NDArray[np.int64]) -> Ranking:
        """Of `rows` only, which ascend; the ranking tells them by their numbers in the whole."""
        ...


class ScanCopy(Protocol):
    """The vectors of one collection, in the form and the place that a scan wants. Rows are only ever added, so a view
    stays what it was. Used by one thread at a time; after an error not at all."""

    def append(self, vectors: Vectors) -> None:
        """Rows (n, d) float32 behind those there are: unit vectors, or zeros, which are never allowed in `rank`."""
        ...

    def kept(self, rows: NDArray[np.bool_]) -> ScanCopy:
        """Another copy, of these rows (n,) only; views of this one stay."""
        ...

    def view(self) -> ScanView:
        """What has been appended so far."""
        ...


class VectorScan(Protocol):
    """Exact search over vectors that are held ready: as float32 by NumPy, as integers, or on a card where the service
    injects that. The store reads the few rows a `Ranking` names from its own file and scores them in double precision,
    so every scan leads to the same hits."""

    def copy(self, dimension: int) -> ScanCopy:
        """An empty one."""
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

"""The protocols of a vector store: `VectorStore` writes and opens, `View` reads one collection, `Generations` manages
its versions. Every implementation must pass `tests/contracts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from connector.model import (
    ChangeSet,
    Checkpoint,
    CollectionStatus,
    Filter,
    Generation,
    Hit,
    IndexUse,
    Lease,
    QuarantinedRow,
    Recipe,
    Sample,
    StoredChunk,
    StoredRecord,
    StoredText,
    Vectors,
)
from connector.protocols import Embedder


class VectorStore(Protocol):
    """Thread-safe. `collection` is the configured name, or NAME@N for a generation that is not active.

    Writes need a `Lease`; every write transaction compares its epoch. Methods other than `open` and `status` raise
    UnknownCollection.
    """

    def open(self, collection: str, embedder: Embedder) -> Checkpoint:
        """Create missing tables and rows. Raises ModelMismatch if the collection holds vectors of another model."""
        ...

    def lease(self, collection: str, owner: str, wait: float) -> AbstractContextManager[Lease]:
        """Take the collection's lease for writing. It is renewed in the background and expires 30 s after a crash.
        Raises LeaseLost if another owner keeps it for more than `wait` seconds."""
        ...

    def apply(self, lease: Lease, changes: ChangeSet) -> None:
        """Write all changes in one transaction.

        Raises LeaseLost after a takeover, RowRejected for data that the store rejects, Overloaded if a smaller change
        set may succeed. RowsRejected gives positions in `chunks` followed by `metadata_only`; its list may be
        incomplete or wrong.
        """
        ...

    def optimise(self, collection: str) -> None:
        """Build or refresh the search index after a bulk load. Cheap if nothing has changed."""
        ...

    def view(self, collection: str, generation: int | None = None, row_filter: Filter | None = None) -> View:
        """Return a reader of the rows that match `row_filter` (None: all), which must be safe (`filters.narrowed`). Its
        methods raise GenerationChanged unless `generation` (None: any) is active."""
        ...

    def stored(self, collection: str, ids: Sequence[str] | None = None) -> Iterator[list[StoredChunk]]:
        """Yield our chunks (of these documents, None: all) in pages, unordered, without foreign rows."""
        ...

    def records(self, collection: str) -> Iterator[list[StoredRecord]]:
        """Yield every record in pages, foreign rows included."""
        ...

    def quarantine(self, collection: str) -> list[QuarantinedRow]: ...

    def status(self, collection: str) -> CollectionStatus | None:
        """Return the status; None if the collection was never opened."""
        ...

    @property
    def generations(self) -> Generations: ...

    def close(self) -> None: ...


class View(Protocol):
    """Reads one collection. Rows outside the row filter affect no result, score or error: a `where` that cannot be
    compared with their values does not fail. All methods raise UnknownCollection and GenerationChanged; those with a
    `where` also BadFilter."""

    def search(
        self, vector: NDArray[np.float32], k: int, where: Filter | None = None, *, exact: bool = False
    ) -> list[Hit]:
        """Return up to `k` documents by their best chunk, best first, ties by id. `exact`: no approximate index."""
        ...

    def keyword(self, text: str, k: int, where: Filter | None = None) -> list[Hit]:
        """Return hits as in `search`, by BM25 over the words of `text` (`stores/words.py`): whole words, any case, any
        of them. Scores are comparable only within one result. `text` has no query syntax."""
        ...

    def keyed(self, number: str, count: int, where: Filter | None = None) -> list[Hit]:
        """Return the first chunk of up to `count` rows whose id contains `number` (letters and digits), with score 0.
        Rows with that key value (`words.as_key_value`) come first, then by id. Scans every id."""
        ...

    def texts(self, ids: Sequence[str]) -> list[StoredText]:
        """Return every chunk of these rows, by the order of `ids` (duplicates once), then by chunk number. Omits
        unknown ids."""
        ...

    def vectors(self, chunks: Sequence[Hit | StoredText]) -> Vectors:
        """Return the stored vectors in the order of `chunks`; zeros for a chunk deleted in between."""
        ...

    def sample(self, count: int, *, texts: bool = True) -> Sample:
        """Return up to `count` rows spread over the collection, foreign ones included. The result is stable until the
        next write, and a smaller sample is a prefix of a larger one. Without `texts` each text is "". Scans every row's
        number, and its metadata if there is a row filter."""
        ...

    def index_use(self, k: int, where: Filter | None = None) -> IndexUse:
        """Return whether `search` with these arguments uses an approximate index."""
        ...


class Generations(Protocol):
    """The versions of collections, by collection name and number."""

    def all(self, collection: str, counted: bool = True) -> list[Generation]:
        """Return all generations by number; [] if the collection was never opened. Counting rows scans every record."""
        ...

    def begin(self, collection: str, embedder: Embedder, recipe: Recipe) -> str:
        """Return the name NAME@N of a generation to build beside the active one with `embedder`. In this order: the
        newest unfinished one of that model, the newest retired one of that model and recipe (to rebuild), a new one.
        Raises UnknownCollection if none is active."""
        ...

    def record(self, collection: str, number: int, recipe: Recipe) -> None:
        """Store the recipe of a generation. Does nothing if the generation does not exist."""
        ...

    def switch(self, collection: str, number: int) -> None:
        """Make this generation active and retire the other, in one transaction. Writers to either lose their lease.
        Does nothing if it is already active. Raises UnknownGeneration."""
        ...

    def drop(self, collection: str, number: int) -> None:
        """Delete a generation that is not active. An interrupted drop leaves it unfinished. Raises UnknownGeneration,
        GenerationRefused for the active one, LeaseLost while it is being written."""
        ...

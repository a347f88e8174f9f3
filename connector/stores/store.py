"""The protocols of a vector store: `VectorStore` writes and opens, `View` reads one collection, `Generations` keeps the
versions of a collection. `tests/contracts` is the suite that each implementation passes.
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
        """Create what is missing. Raises ModelMismatch when the collection holds vectors of another model."""
        ...

    def lease(self, collection: str, owner: str, wait: float) -> AbstractContextManager[Lease]:
        """Own the collection for writing. The lease is renewed in the background and ends 30 s after a crash. Raises
        LeaseLost when another owner keeps it longer than `wait` seconds."""
        ...

    def apply(self, lease: Lease, changes: ChangeSet) -> None:
        """Write all changes in one transaction.

        Raises LeaseLost after a takeover, RowRejected for data that the store rejects, Overloaded when a smaller change
        set may succeed. RowsRejected names the rejected rows by their positions in `chunks` followed by
        `metadata_only`; its list may be incomplete or wrong.
        """
        ...

    def optimise(self, collection: str) -> None:
        """Build or refresh the search index after a bulk load. Cheap when there is nothing to do."""
        ...

    def view(self, collection: str, generation: int | None = None, row_filter: Filter | None = None) -> View:
        """Return a reader of the rows that match `row_filter` (None: all), which must be safe (`filters.narrowed`).
        Its methods raise GenerationChanged when another generation than `generation` (None: any) is active."""
        ...

    def stored(self, collection: str, ids: Sequence[str] | None = None) -> Iterator[list[StoredChunk]]:
        """Yield our chunks (of these documents, None: of all) in pages, unordered, without foreign rows."""
        ...

    def records(self, collection: str) -> Iterator[list[StoredRecord]]:
        """Yield every record in pages, foreign rows included."""
        ...

    def quarantine(self, collection: str) -> list[QuarantinedRow]: ...

    def status(self, collection: str) -> CollectionStatus | None:
        """Return None when the collection was never opened."""
        ...

    @property
    def generations(self) -> Generations: ...

    def close(self) -> None: ...


class View(Protocol):
    """Reads one collection. Rows that the row filter excludes affect no result, no score and no error: a `where` that
    cannot be compared with their values does not fail. All methods raise UnknownCollection and GenerationChanged, those
    with a `where` BadFilter."""

    def search(
        self, vector: NDArray[np.float32], k: int, where: Filter | None = None, *, exact: bool = False
    ) -> list[Hit]:
        """Return up to `k` documents by their best chunk, best first, ties by id. `exact`: use no approximate index."""
        ...

    def keyword(self, text: str, k: int, where: Filter | None = None) -> list[Hit]:
        """As `search`, by BM25 over the words of `text` (`stores/words.py`): whole words, any case, any of them. Scores
        are comparable within one result only. `text` has no query syntax."""
        ...

    def keyed(self, number: str, count: int, where: Filter | None = None) -> list[Hit]:
        """Return the first chunk of up to `count` rows whose id contains `number` (letters and digits), with score 0:
        rows with it as a key value (`words.as_key_value`) first, then by id. Scans every id."""
        ...

    def texts(self, ids: Sequence[str]) -> list[StoredText]:
        """Return every chunk of these rows, in the order of `ids` (each once) and of chunk numbers. Unknown ids are
        left out; any text may be an id."""
        ...

    def vectors(self, chunks: Sequence[Hit | StoredText]) -> Vectors:
        """Return the stored vectors in the order of `chunks`; zeros for a chunk that was deleted meanwhile."""
        ...

    def sample(self, count: int, *, texts: bool = True) -> Sample:
        """Return up to `count` rows spread over the collection, foreign ones included. The result is the same until the
        next write, and a smaller sample is its beginning. Without `texts` each text is "". Scans every row's number,
        and its metadata where there is a row filter."""
        ...

    def index_use(self, k: int, where: Filter | None = None) -> IndexUse:
        """Say whether `search` with these arguments uses an approximate index."""
        ...


class Generations(Protocol):
    """The versions of collections, by collection name and number."""

    def all(self, collection: str, counted: bool = True) -> list[Generation]:
        """Return them by number; [] when the collection was never opened. Counting rows scans every record."""
        ...

    def begin(self, collection: str, embedder: Embedder, recipe: Recipe) -> str:
        """Return the name NAME@N of a generation to build beside the active one with vectors of `embedder`: the newest
        unfinished one of that model, else the newest retired one of that model and recipe (to be rebuilt), else a new
        one. Raises UnknownCollection where none is active."""
        ...

    def record(self, collection: str, number: int, recipe: Recipe) -> None:
        """Store the recipe of a generation. Does nothing when there is no such generation."""
        ...

    def switch(self, collection: str, number: int) -> None:
        """Make this generation the active one and retire the other, in one transaction. Writers to either lose their
        lease. Does nothing when it is active already. Raises UnknownGeneration."""
        ...

    def drop(self, collection: str, number: int) -> None:
        """Delete a generation that is not active; after an interruption it is left as unfinished. Raises
        UnknownGeneration, GenerationRefused for the active one, LeaseLost while it is being written."""
        ...

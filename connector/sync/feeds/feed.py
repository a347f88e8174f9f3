"""The protocol of a change method: it checks its settings and gives each run a feed of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from connector.document.document import quarantine_id
from connector.model import CollectionSpec, Key, Query, Row, Table
from connector.protocols import Source

Mark = Mapping[str, Any]  # a method's read position, as JSON; kept in the checkpoint


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of the source, in reading order.

    `load`: None if the rows are complete. Otherwise they have only key and token, and `load` reads the rows whose token
    differs from the stored one. `gone`: deleted keys. `mark`: the mark to store once this batch and all
    earlier ones are stored. `done`: called after that commit.
    """

    rows: Sequence[Row]
    load: Callable[[Sequence[Key]], Sequence[Row]] | None = None
    gone: Sequence[Key] = ()
    mark: Mark | None = None
    done: Callable[[], None] | None = None


Batches = tuple[int, Sequence[Iterator[Batch]]]


@dataclass(frozen=True, slots=True)
class Feed:
    """The batches of one run.

    `read`: returns the expected rows (0 if unknown), and iterators that together give every batch once, each read in
    its own thread; called once. `mark`: where the next run begins, valid once all batches are stored. `method`:
    how this run finds changes; `reason`: why a full comparison ("full") replaces the configured method, or "".
    """

    read: Callable[[], Batches]
    mark: Mark | None
    method: str
    reason: str = ""
    complete: bool = True  # the feed gives every row, so stored rows that it omits were deleted
    trusts_tokens: bool = True  # a row with the stored token is unchanged; False in a comparison that verifies them

    @property
    def by_values(self) -> bool:
        """Return whether the feed compares every row by the values that `Source.pages` gives, without tokens."""
        return self.complete and self.method == "full" and self.trusts_tokens


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The input of one run. `rendering`: `Renderer.digest`. `now`: UTC, by the source's clock. `full`: compare every
    row. `readers`: as in SyncOptions.

    `choose` adds the results of earlier runs. `before`: the last mark; empty if made for other settings or another
    table. `identity`: required content of every mark of this run. `due`: why all rows must be compared, or "".
    """

    spec: CollectionSpec
    query: Query
    rendering: bytes
    table: Table
    page_rows: int
    now: datetime
    full: bool = False
    readers: int = 1
    before: Mark = field(default_factory=dict)
    identity: Mark = field(default_factory=dict)
    due: str = ""


def current(plan: ReadPlan, source: Source, keys: Iterable[Key]) -> Batch:
    """Return the rows that have these keys now, each once, and the keys that no row has."""
    wanted = {quarantine_id(key): key for key in keys}
    rows = source.rows(plan.query, list(wanted.values()))
    found = {quarantine_id(row.key) for row in rows}
    return Batch(rows, gone=[key for id_, key in wanted.items() if id_ not in found])


class ChangeMethod(Protocol):
    """The functions that the module of each method provides."""

    def check(self, spec: CollectionSpec, table: Table, source: Source) -> None:
        """Raise ConfigurationError if the method cannot work with this table."""

    def identity(self, plan: ReadPlan, source: Source) -> Mark:
        """Return facts of the source that a mark depends on, besides the settings. A change discards the mark."""

    def feed(self, plan: ReadPlan, source: Source) -> Feed:
        """Return the feed of this run: a full comparison if `plan.due`."""

"""The protocols of a change method: it checks its settings and gives each run a feed of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from connector.model import CollectionSpec, Key, Query, Row, Table
from connector.protocols import Source

Mark = Mapping[str, Any]  # how far a method has read, as JSON; kept in the checkpoint


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of the source, in the order in which they were read.

    `load`: None, or the rows have only key and token, and `load` reads those whose token differs from the stored one,
    with the token of the content it returns. `gone`: keys that the source no longer has. `mark`: the mark that may be
    stored once this batch and all before it are stored. `done`: called after that was committed. `late`: whether the
    configured method would have missed a change in the row with this key.
    """

    rows: Sequence[Row]
    load: Callable[[Sequence[Key]], Sequence[Row]] | None = None
    gone: Sequence[Key] = ()
    mark: Mark | None = None
    done: Callable[[], None] | None = None
    late: Callable[[Key], bool] | None = None


class Feed(Protocol):
    """The batches of one run."""

    complete: bool  # it gives every row, so a stored row that it does not give is gone
    trusts_tokens: bool  # a row with the stored token is unchanged; False in a comparison that verifies the tokens

    def total(self) -> int:
        """Rows to expect, for progress; 0 when unknown. Called before `streams`."""
        ...

    def streams(self) -> Sequence[Iterator[Batch]]:
        """Iterators that together give every batch once, each read in a thread of its own. Called once."""
        ...

    def mark(self) -> Mark | None:
        """Where the next run continues, once all batches are stored."""
        ...


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What one run reads. `rendering`: `Renderer.digest`. `now`: UTC, by the source. `full`: compare every row,
    whatever the method. `readers`: as in SyncOptions."""

    spec: CollectionSpec
    query: Query
    rendering: bytes
    table: Table
    page_rows: int
    now: datetime
    full: bool = False
    readers: int = 1


@dataclass(frozen=True, slots=True)
class Earlier:
    """What earlier runs left. `mark`: empty when it was made for other settings or another table. `identity`: what
    every mark of this run must contain. `due`: why every row must be compared, "" otherwise. `compared`: an earlier
    full comparison has finished."""

    mark: Mark
    identity: Mark
    due: str
    compared: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """`method`: how this run finds changes; "full" for a full comparison, and `reason` why it replaces the configured
    method, "" when it does not."""

    feed: Feed
    method: str
    reason: str = ""


class ChangeMethod(Protocol):
    def check(self, spec: CollectionSpec, table: Table) -> None:
        """Raises ConfigurationError where the method cannot work with this table."""
        ...

    def identity(self, plan: ReadPlan, source: Source) -> Mark:
        """Facts of the source that a mark depends on, beside the settings; a change of them discards the mark."""
        ...

    def choose(self, plan: ReadPlan, source: Source, earlier: Earlier) -> Choice:
        """Return the feed of this run: a full comparison when `earlier.due`."""
        ...

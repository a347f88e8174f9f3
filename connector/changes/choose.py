"""Which way a run finds changes: the configured one, or the full comparison when that is due."""

from __future__ import annotations

from dataclasses import dataclass

from connector.changes.feed import Feed
from connector.changes.full import FullFeed
from connector.model import Checkpoint, CollectionSpec, Query, Source


@dataclass(frozen=True, slots=True)
class Wanted:
    """`full`: compare everything, whatever the method and whenever it was last done. `readers`: as in SyncOptions."""

    spec: CollectionSpec
    query: Query
    page_rows: int
    full: bool = False
    readers: int = 1


def choose(wanted: Wanted, source: Source, checkpoint: Checkpoint) -> Feed:
    return FullFeed(source, wanted.query, wanted.page_rows, readers=wanted.readers)

"""Which way a run finds changes: the configured one, or the full comparison when that is due. Every method keeps in its
mark for which settings and which table it was made; anything else begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from hashlib import blake2b
from typing import Any

from connector.errors import ConfigurationError, LogMissing
from connector.hana.catalog import check_columns
from connector.hana.change_log import log_of
from connector.hana.watermarks import watermark
from connector.model import Checkpoint, CollectionSpec, Column, Query, RowIds, Table, Token
from connector.protocols import Source
from connector.sync.feeds.feed import Feed
from connector.sync.feeds.full import FullFeed
from connector.sync.feeds.log import LogFeed
from connector.sync.feeds.tokens import TokenFeed, regressed
from connector.sync.feeds.watermark import Clocked, LateFeed, WatermarkFeed, next_mark


@dataclass(frozen=True, slots=True)
class Wanted:
    """`rendering`: `Renderer.digest`. `full`: compare everything, whatever the method and whenever it was last done.
    `now`: UTC, by the source. `readers`: as in SyncOptions."""

    spec: CollectionSpec
    query: Query
    rendering: bytes
    table: Table
    page_rows: int
    now: datetime
    full: bool = False
    readers: int = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """`method`: how rows are found, `full` for every comparison of everything; `reason`: why that and not the
    configured one, "" when it is."""

    feed: Feed
    method: str
    reason: str = ""


def check(spec: CollectionSpec, table: Table) -> None:
    """Raises ConfigurationError where the method cannot work with this table, whatever is stored."""
    changes = spec.changes
    if changes.method == "watermark":
        watermark(_watermark_column(spec, table), table.ref)
    if changes.method in ("log", "rowid") and table.is_view:
        what = "triggers stand" if changes.method == "log" else 'row ids ("$rowid$") stand'
        raise ConfigurationError(
            f'`changes.method`: {table.ref} is a view, and {what} in tables only; use "full" with hash = "server", or '
            '"watermark"'
        )


def choose(wanted: Wanted, source: Source, checkpoint: Checkpoint) -> Choice:
    """Raises ConfigurationError where the method cannot work, LogMissing where its log does not."""
    changes = wanted.spec.changes
    identity = _identity(wanted, source)
    # Whatever the reason to compare everything: a mark of something else says nothing about this table.
    mark = {} if _differs(checkpoint, identity) else checkpoint.mark or {}
    due = _due(wanted, checkpoint, identity)
    if changes.method == "watermark":
        # What a paused run held back was not missed by the watermark.
        late = checkpoint.last_full is not None
        return _by_watermark(wanted, source, mark, identity, due, late=late)
    if changes.method == "log":
        log = log_of(wanted.spec)
        try:
            source.capture.check_log(wanted.query, log)
        except LogMissing as error:
            collection = wanted.spec.name.partition("@")[0]
            advice = f"see `owl-sap changes install {collection}`; the next run then compares everything"
            raise LogMissing(f"{error}: {advice}") from None
        if not due:
            return Choice(LogFeed(source, wanted.query, log, wanted.page_rows, identity), "log")
    if changes.method == "rowid" or changes.hash == "server":
        return _by_tokens(wanted, source, mark, identity, due)
    plain = FullFeed(source, wanted.query, wanted.page_rows, identity, wanted.readers)
    return Choice(plain, "full", due if changes.method != "full" else "")


_NEVER = "no full comparison has finished yet"
_UNPROVED = "none has finished since a pause or a switch of generations"


def _differs(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> bool:
    return any((checkpoint.mark or {}).get(name) != value for name, value in identity.items())


def _due(wanted: Wanted, checkpoint: Checkpoint, identity: Mapping[str, Any]) -> str:
    """Why everything has to be compared; "" when it has not."""
    mark = checkpoint.mark or {}
    if wanted.full:
        return "requested"
    if not mark or checkpoint.last_full is None:
        return _UNPROVED if checkpoint.source else _NEVER
    if _differs(checkpoint, identity):
        return "the settings or the table changed"
    # A clock that was set back far is no reason never to look again.
    last = datetime.fromisoformat(mark["proved"]) if "proved" in mark else checkpoint.last_full
    if abs((wanted.now - last).total_seconds()) >= wanted.spec.changes.reconcile:
        return "the last full comparison is too long ago"
    return ""


def _identity(wanted: Wanted, source: Source) -> dict[str, Any]:
    """What a mark was made for: the method with its settings, the query, what is made of its rows, the very table."""
    changes, query = wanted.spec.changes, wanted.query
    found: dict[str, Any] = {"method": changes.method, "of": _digest(wanted)}
    if changes.method != "full":
        found["table"] = source.capture.table_id(query.table)
    if changes.method == "log":
        found["log"] = source.capture.table_id(log_of(wanted.spec))
    return found


def _digest(wanted: Wanted) -> str:
    changes = wanted.spec.changes
    settings = (changes.method, changes.column, changes.hash, changes.method == "log" and str(log_of(wanted.spec)))
    return blake2b(repr((settings, wanted.rendering, asdict(wanted.query))).encode(), digest_size=8).hexdigest()


def same_settings(wanted: Wanted, checkpoint: Checkpoint) -> bool:
    """Were the settings those of now when the last run ended?"""
    return (checkpoint.mark or {}).get("of") == _digest(wanted)


def _by_watermark(
    wanted: Wanted,
    source: Source,
    mark: Mapping[str, Any],
    identity: dict[str, Any],
    due: str,
    *,
    late: bool,
) -> Choice:
    changes, query = wanted.spec.changes, wanted.query
    clocked = Clocked(query, _watermark_column(wanted.spec, wanted.table), wanted.now, changes.delay)
    at = mark.get("at")
    if not due and at is not None:
        return Choice(WatermarkFeed(source.capture, clocked, wanted.page_rows, mark, identity), "watermark")
    _, after = next_mark(source.capture, clocked, mark or None)

    def full(extended: Query) -> FullFeed:
        return FullFeed(source, extended, wanted.page_rows, {**after, **identity}, wanted.readers)

    feed: Feed = full(query) if at is None or not late else LateFeed(full, clocked, at)
    return Choice(feed, "full", due or "no value of the watermark is old enough to continue from")


def _by_tokens(wanted: Wanted, source: Source, mark: Mapping[str, Any], identity: dict[str, Any], due: str) -> Choice:
    """Of a collection whose tokens are trusted: all of them, cheap. Otherwise rows and tokens, to prove them."""
    after = dict(identity)
    if wanted.spec.changes.method == "rowid":
        ids = source.capture.row_ids(wanted.query)
        after |= {"highest": ids.highest, "rows": ids.rows}
        due = due or regressed(RowIds(mark["highest"], mark["rows"]), ids)
    token: Token = "rowid" if wanted.spec.changes.method == "rowid" else "hash"
    after["proved"] = wanted.now.isoformat() if due else mark["proved"]
    feed = TokenFeed(source, wanted.query, token, wanted.page_rows, prove=bool(due)).marked(after)
    return Choice(feed, "full" if due else token, due)


def _watermark_column(spec: CollectionSpec, table: Table) -> Column:
    name = spec.changes.column
    if name is None:
        raise ConfigurationError('`changes.column`: method = "watermark" needs the column that every change sets')
    check_columns(table, [name], "changes.column")
    column = table.column(name)
    assert column is not None  # check_columns has seen to it
    return column

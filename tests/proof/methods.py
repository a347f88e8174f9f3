"""The ways to find changes, each with what it needs in the database and what its checkpoint promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from connector.document.document import document_id, parse_id
from connector.hana import change_log
from connector.hana.connection import HanaPool, quote
from connector.hana.source import HanaSource
from connector.model import ChangeSpec, Checkpoint, CollectionSpec, Query, log_of

if TYPE_CHECKING:
    from tests.proof.ground import Ground

Install = Callable[[CollectionSpec, HanaPool, str], None]
OpenIds = Callable[["Ground", Checkpoint], set[str]]


def _nothing(spec: CollectionSpec, pool: HanaPool, user: str) -> None:
    """It needs nothing in the database."""


def _log(spec: CollectionSpec, pool: HanaPool, user: str) -> None:
    assert change_log.install(pool, spec, user)["complete"]


def _delta(spec: CollectionSpec, pool: HanaPool, user: str) -> None:
    """Triggers write what SAP's tools would; a change is recorded twice, and images come in any order."""
    rows, delta = (f"{quote(spec.source.schema)}.{quote(name)}" for name in ("ROWS", "ROWS_Delta"))
    pool.execute(f'CREATE COLUMN TABLE {delta} ("K" INTEGER, "Change_Type" NVARCHAR(1), "Change_Date" TIMESTAMP)')
    for event, images in {"INSERT": {"L": "n"}, "UPDATE": {"U": "n", "B": "o"}, "DELETE": {"D": "o"}}.items():
        bodies = [
            f"INSERT INTO {delta} VALUES (:{row}.\"K\", '{kind}', CURRENT_UTCTIMESTAMP);" * 2
            for kind, row in images.items()
        ]
        named = ", ".join(f"{'NEW' if row == 'n' else 'OLD'} ROW {row}" for row in images.values())
        pool.execute(
            f'CREATE TRIGGER {quote(spec.source.schema)}."RECORD_{event}" AFTER {event} ON {rows} '
            f"REFERENCING {named} FOR EACH ROW BEGIN {' '.join(bodies)} END"
        )


def _everything(ground: Ground, checkpoint: Checkpoint) -> set[str]:
    """Between two complete runs its checkpoint promises nothing about single rows."""
    return set(ground.versions)


def _behind_the_mark(ground: Ground, checkpoint: Checkpoint) -> set[str]:
    """Rows whose (watermark, key) the mark has not reached; and rows that are gone, which no watermark shows."""
    mark = checkpoint.mark or {}
    (last,) = parse_id(mark["key"]) if "key" in mark else (None,)
    rows = ground.run('SELECT "K", "CHANGED_AT" FROM "ROWS"')
    reached = datetime.fromisoformat(mark["at"]).replace(tzinfo=None)
    settled = {
        document_id((key,)) for key, at in rows if at < reached or (at == reached and (last is None or key <= last))
    }
    return set(ground.versions) - settled


def _recorded_after_the_mark(ground: Ground, checkpoint: Checkpoint) -> set[str]:
    """Rows with a record at the time of the mark, or after it."""
    reached = datetime.fromisoformat((checkpoint.mark or {})["at"]).replace(tzinfo=None)
    return {
        document_id((key,)) for key, at in ground.run('SELECT "K", "Change_Date" FROM "ROWS_Delta"') if at >= reached
    }


def _in_the_log(ground: Ground, checkpoint: Checkpoint) -> set[str]:
    """Rows with an entry that is still there."""
    spec = ground.plan.spec
    query = Query(spec.source, ("K",), ("TXT", "GRP"))
    entries = HanaSource(ground.pool).capture.log_entries(query, log_of(spec), 0, 100_000)
    return {document_id(key) for _, key in entries}


def _unless_all_was_read(ground: Ground, checkpoint: Checkpoint) -> set[str]:
    """A new mark is that of a run that has read every row's token."""
    return set(ground.versions) if checkpoint.mark == ground.before.mark else set()


ROUND = (
    *("after_lease", "after_read", "after_render", "after_embed", "before_apply", "mid_upsert", "after_apply"),
    *("before_checkpoint", "mid_checkpoint", "after_checkpoint"),
)
"""The failpoints on the way of every run."""
ONCE = ("after_lease", "before_checkpoint", "after_checkpoint")
"""Of these a run passes no more than one."""


@dataclass(frozen=True)
class Method:
    """`passes`: the failpoints on its way, `once` those that one run passes a single time. `open_ids`: rows of which
    the checkpoint does not yet say that they are stored."""

    spec: ChangeSpec
    passes: tuple[str, ...] = ROUND
    once: tuple[str, ...] = ONCE
    install: Install = _nothing
    open_ids: OpenIds = _everything


WHOLE = ((*ROUND, "mid_delete"), (*ONCE, "mid_checkpoint"))
"""Of runs that see every row: they delete what they did not see, and have one checkpoint, at their end."""

METHODS = {
    "full": Method(ChangeSpec(), *WHOLE),
    "hash": Method(ChangeSpec(hash="server"), *WHOLE, open_ids=_unless_all_was_read),
    "rowid": Method(ChangeSpec("rowid"), *WHOLE, open_ids=_unless_all_was_read),
    "watermark": Method(ChangeSpec("watermark", "CHANGED_AT", delay=0), open_ids=_behind_the_mark),
    "log": Method(
        ChangeSpec("log"),
        (*ROUND, "before_log_delete", "after_log_delete"),
        (*ONCE, "mid_checkpoint"),
        install=_log,
        open_ids=_in_the_log,
    ),
    "delta": Method(ChangeSpec("delta", delay=0), install=_delta, open_ids=_recorded_after_the_mark),
}

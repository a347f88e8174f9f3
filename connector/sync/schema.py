"""Detect changes of the source's table or columns since the last sync. They pause the collection; no rows are lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from connector.document.document import Renderer
from connector.errors import (
    ConfigurationError,
    LogMissing,
    SchemaChanged,
    SyncPaused,
    UnknownColumn,
    UnknownTable,
    WrongOrigin,
)
from connector.model import ChangeSet, Checkpoint, CollectionSpec, Lease, Table, TableRef
from connector.protocols import Source
from connector.stores.store import VectorStore
from connector.sync.feeds.choose import check, same_settings
from connector.sync.feeds.feed import ReadPlan
from connector.sync.options import Ends

WRITTEN: Mapping[str, Any] = {"method": "documents"}  # the mark of a collection that clients write


def check_origin(collection: str, checkpoint: Checkpoint) -> None:
    """Raise WrongOrigin for a collection that clients have written: a sync would delete all its documents."""
    if checkpoint.mark == WRITTEN:
        raise WrongOrigin(
            f'"{collection}" holds documents that clients wrote (documents = true); a sync would delete them. Use '
            "another collection name for the table"
        )


def columns_in_use(renderer: Renderer, table: Table, spec: CollectionSpec) -> dict[str, str]:
    """Return the types of the columns that a sync reads, by name."""
    used = (*renderer.query.key, *renderer.query.columns, spec.changes.column)
    return _types(table, [name for name in dict.fromkeys(used) if name is not None])


def _types(table: Table, columns: Iterable[str]) -> dict[str, str]:
    return {name: column.type_name for name in columns if (column := table.column(name)) is not None}


def was_synced(checkpoint: Checkpoint, source: TableRef) -> bool:
    """Return whether an earlier sync read this whole table. If none did, a missing table is a configuration error,
    not a change of the source."""
    return checkpoint.last_sync is not None and checkpoint.source == str(source)


def retyped(now: Mapping[str, str], checkpoint: Checkpoint) -> list[str]:
    """Return a phrase for each column whose type changed since the last sync."""
    return [
        f"{name} was {checkpoint.columns[name]} and is {kind}"
        for name, kind in now.items()
        if checkpoint.columns.get(name, kind) != kind
    ]


def other_key(now: Sequence[str], checkpoint: Checkpoint) -> str:
    """Return a clause that says how the key differs from that of the stored rows; "" if equal."""
    if not checkpoint.key or tuple(checkpoint.key) == tuple(now):
        return ""
    return f"the key was {', '.join(checkpoint.key)} at the last sync and is {', '.join(now)} now"


def readable(spec: CollectionSpec, ends: Ends) -> tuple[Table, Renderer]:
    """Return the table and the renderer of its rows. Raises SyncPaused if a table or column that an earlier sync read
    is missing, and ConfigurationError if it was never there."""
    table: Table | None = None
    try:
        table = ends.source.describe(spec.source)
        check(spec, table, ends.source)
        return table, Renderer(spec, table, ends.embedder)
    except ConfigurationError as error:
        status = ends.store.status(spec.name)
        if status is None or not was_synced(status.checkpoint, spec.source):
            raise
        if table is None and isinstance(error, UnknownTable):
            raise _paused(
                f"{error} It existed at the last sync. The stored rows are kept; sync again once the table is back"
            ) from None
        template = spec.template.replace('"', "")
        used = {spec.changes.column, *spec.key, *spec.metadata}
        gone = [
            name
            for name in status.checkpoint.columns
            if table is not None and table.column(name) is None and (name in used or "{" + name + "}" in template)
        ]
        if gone:
            raise _paused(
                f"{spec.source} no longer has the column {', '.join(gone)}, which the collection uses. The stored rows "
                "are kept; change template, metadata or key, or restore the column"
            ) from None
        raise


def check_types(spec: CollectionSpec, columns: Mapping[str, str], checkpoint: Checkpoint) -> None:
    """Raise SyncPaused if a used column changed its type."""
    if was_synced(checkpoint, spec.source) and (changed := retyped(columns, checkpoint)):
        raise _paused(
            f"{spec.source} has changed: {'; '.join(changed)}. Nothing was read; check `owl-sap plan "
            f"{spec.name}`, then continue with --accept-schema"
        )


def check_key(key: Sequence[str], checkpoint: Checkpoint, store: VectorStore, name: str) -> None:
    """Raise SyncPaused if rows are stored under another key, because their ids would not match."""
    other = other_key(key, checkpoint)
    if other and (status := store.status(name)) is not None and status.rows:
        name = name.partition("@")[0]  # a generation being built is NAME@N
        raise _paused(
            f"{other}: all {status.rows} stored rows would be written again under new ids and the old ones deleted. "
            f"Nothing was read. If this is expected: owl-sap sync {name} --full --max-deletes 1, or, without a gap for "
            f"searches: owl-sap generations {name} --build, then --switch"
        )


def check_unchanged(source: Source, table: TableRef, columns: Mapping[str, str]) -> None:
    """Raise SchemaChanged unless the table has these columns with these types."""
    try:
        now = _types(source.describe(table), columns)
    except UnknownTable as error:
        raise SchemaChanged(f"{table} was dropped while it was read: {error}") from None
    if other := [name for name, kind in columns.items() if now.get(name) != kind]:
        raise SchemaChanged(f"{table} changed while it was read: column {', '.join(other)} has another type or is gone")


@contextmanager
def pausing_on_source_change(plan: ReadPlan, ends: Ends, checkpoint: Checkpoint, lease: Lease) -> Iterator[None]:
    """Turn errors about missing tables, columns and logs into SyncPaused if the last run, with the same settings, could
    read them: the source changed, not the configuration."""
    spec = plan.spec
    try:
        yield
    except LogMissing as error:
        if (checkpoint.mark or {}).get("method") != "log":
            raise
        # Once the log is back, a full comparison finds the changes made without it.
        without_mark = ChangeSet(checkpoint=replace(checkpoint, mark=None, last_full=None), partial=True)
        ends.store.apply(lease, without_mark)
        raise SyncPaused(str(error), reason="log_missing") from None
    except (UnknownTable, UnknownColumn) as error:
        if not (was_synced(checkpoint, spec.source) and same_settings(plan, checkpoint)):
            raise
        try:
            table = ends.source.describe(spec.source)
        except UnknownTable:
            gone = True
        else:
            gone = any(table.column(name) is None for name in (*plan.query.key, *plan.query.columns))
        # Columns named only in `where` cannot be looked up.
        if gone or (isinstance(error, UnknownColumn) and spec.where is not None):
            raise _paused(f"{error} It existed at the last sync. The stored rows are kept") from None
        raise


def _paused(message: str) -> SyncPaused:
    return SyncPaused(message, reason="schema_changed")

"""Choose how a run finds changes: by the configured method, or by a full comparison if one is due."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import datetime
from hashlib import blake2b

from connector.model import Checkpoint, CollectionSpec, Table, delta_of, log_of
from connector.protocols import Source
from connector.sync.feeds import delta, full, log, rowid, watermark
from connector.sync.feeds.feed import ChangeMethod, Feed, ReadPlan

METHODS: Mapping[str, ChangeMethod] = {
    "full": full,
    "watermark": watermark,
    "log": log,
    "rowid": rowid,
    "delta": delta,
}


def check(spec: CollectionSpec, table: Table, source: Source) -> None:
    """Raise ConfigurationError if the configured method cannot work with this table of the source."""
    METHODS[spec.changes.method].check(spec, table, source)


def choose(plan: ReadPlan, source: Source, checkpoint: Checkpoint) -> Feed:
    """Return the feed. Raises ConfigurationError if the method cannot work, LogMissing if its log is missing."""
    method = METHODS[plan.spec.changes.method]
    # A mark is valid only for these settings and this table.
    identity = {"method": plan.spec.changes.method, "of": _digest(plan), **method.identity(plan, source)}
    mark = checkpoint.mark or {}
    changed = any(mark.get(name) != value for name, value in identity.items())
    before, due = {} if changed else mark, _due(plan, checkpoint, changed)
    return method.feed(replace(plan, before=before, identity=identity, due=due), source)


def same_settings(plan: ReadPlan, checkpoint: Checkpoint) -> bool:
    """Return whether the last run had the settings of this plan."""
    return (checkpoint.mark or {}).get("of") == _digest(plan)


def _due(plan: ReadPlan, checkpoint: Checkpoint, changed: bool) -> str:
    """Return why all rows must be compared; "" if not due."""
    if plan.full:
        return "requested"
    if not checkpoint.mark or checkpoint.last_full is None:
        unproved = "no full comparison has finished since a pause, a switch of generations or a quarantine drop"
        return unproved if checkpoint.source else "no full comparison has finished yet"
    if changed:
        return "the settings or the table changed"
    proved = checkpoint.mark.get("proved")
    last = datetime.fromisoformat(proved) if proved else checkpoint.last_full
    # abs(): a clock set back must not postpone the next comparison.
    if abs((plan.now - last).total_seconds()) >= plan.spec.changes.reconcile:
        return "the last full comparison was too long ago"
    return ""


def _digest(plan: ReadPlan) -> str:
    changes = plan.spec.changes
    settings: tuple[object, ...] = (changes.method, changes.column, changes.hash)
    settings += (changes.method == "log" and str(log_of(plan.spec)),)
    if changes.method == "delta":
        settings += (str(delta_of(plan.spec)), changes.type, changes.at)
    return blake2b(repr((settings, plan.rendering, asdict(plan.query))).encode(), digest_size=8).hexdigest()

"""Install and remove the change log of a collection. Changes the source, so only on an explicit command."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from connector.hana.catalog import FIND_TABLE, describe
from connector.hana.change_log import FIND_TRIGGERS, WARNING, Piece, installation, log_of
from connector.hana.connection import HanaPool
from connector.hana.privileges import named, reading
from connector.model import CollectionSpec


@dataclass(frozen=True, slots=True)
class Setup:
    """`pieces` in the order of installation. `complete`: all are present."""

    collection: str
    log: str
    complete: bool
    pieces: tuple[Piece, ...]
    grants: tuple[str, ...]
    warning: str = WARNING

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def look(pool: HanaPool, spec: CollectionSpec, user: str) -> Setup:
    """Return what is installed, from the catalogue. `user`: the user of syncs, for the grants, or "". Raises
    UnknownTable, NoKey, and ConfigurationError for a view."""
    pieces = installation(spec, describe(pool, spec.source))
    log, doing = log_of(spec), f"looking for the change log of {spec.name}"
    found = {str(row[0]) for row in pool.read(FIND_TRIGGERS, (spec.source.schema, spec.source.name), doing=doing)}
    if pool.read(FIND_TABLE, (log.schema, log.name), doing=doing):
        found.add(log.name)
    grants = tuple(each.grant(named(user) if user else "<the user of syncs>") for each in reading(spec))
    seen = tuple(replace(piece, present=piece.name in found) for piece in pieces)
    return Setup(spec.name, str(log), all(piece.present for piece in seen), seen, grants)


def install(pool: HanaPool, spec: CollectionSpec, user: str) -> Setup:
    """Create what is missing. Needs the privileges to create in the schema of the log, TRIGGER on the source, and
    INSERT on the log."""
    before = look(pool, spec, user)
    for piece in before.pieces:
        if not piece.present:
            pool.execute(piece.create, doing=f"creating {piece.name}")
    return _changed(before, look(pool, spec, user))


def remove(pool: HanaPool, spec: CollectionSpec, user: str) -> Setup:
    """Drop what is present, the triggers first: a trigger without its log would make every write fail."""
    before = look(pool, spec, user)
    for piece in reversed(before.pieces):
        if piece.present:
            pool.execute(piece.drop, doing=f"dropping {piece.name}")
    return _changed(before, look(pool, spec, user))


def _changed(before: Setup, after: Setup) -> Setup:
    pairs = zip(before.pieces, after.pieces, strict=True)
    return replace(after, pieces=tuple(replace(now, done=old.present != now.present) for old, now in pairs))

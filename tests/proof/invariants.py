"""The invariants I1 to I7 of a collection, as one checker for every test that breaks something. It knows the protocols
and what the rows should be stored as; nothing of stores, feeds, hashes or of how the product compares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from connector.model import StoredRecord
from connector.protocols import Embedder
from connector.stores.store import VectorStore


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a row should be stored as: its chunks in order, and the metadata of each."""

    chunks: tuple[str, ...]
    metadata: tuple[tuple[str, Any], ...] = ()


@dataclass(slots=True)
class Stored:
    """What a store holds of a collection."""

    documents: dict[str, list[StoredRecord]] = field(default_factory=dict)
    quarantined: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, store: VectorStore, collection: str) -> Stored:
        if store.status(collection) is None:
            return cls()
        found = cls(quarantined={row.id for row in store.quarantine(collection)})
        for page in store.records(collection):
            for record in page:
                if record.id is not None:
                    found.documents.setdefault(record.id, []).append(record)
        for records in found.documents.values():
            records.sort(key=lambda record: record.number or 0)
        return found

    def as_wanted(self, id_: str) -> Wanted:
        """The document in the form in which it is wanted, so that both can be compared."""
        records = self.documents[id_]
        metadata = tuple(sorted((records[0].metadata or {}).items()))
        return Wanted(tuple(record.text or "" for record in records), metadata)


@dataclass(slots=True)
class Truth:
    """What the source says. `versions`: everything that each row has ever been; `poison`: ids that cannot be stored."""

    wanted: dict[str, Wanted]
    poison: set[str] = field(default_factory=set)
    versions: dict[str, set[Wanted]] = field(default_factory=dict)


def sound(stored: Stored, truth: Truth, embedder: Embedder) -> Iterator[str]:
    """What holds at any moment, whoever was killed where: I3 unique, I6 whole rows of one version, I4 right vectors."""
    for id_, records in stored.documents.items():
        numbers = [record.number for record in records]
        if len(set(numbers)) < len(numbers):
            yield f"I3: {id_} holds a chunk twice: {numbers}"
        elif numbers != list(range(len(numbers))):
            yield f"I6: {id_} is torn: {numbers}"
        elif len({repr(sorted((record.metadata or {}).items())) for record in records}) > 1:
            yield f"I6: chunks of {id_} have metadata of different versions"
        elif truth.versions and stored.as_wanted(id_) not in truth.versions.get(id_, set()):
            yield f"I6: {id_} is stored as something it never was"
    yield from _vectors([record for records in stored.documents.values() for record in records], embedder)


def _vectors(records: Sequence[StoredRecord], embedder: Embedder) -> Iterator[str]:
    texts = list({record.text or "": None for record in records})
    if not texts:
        return
    fresh = dict(zip(texts, embedder.embed_documents(texts), strict=True))
    for record in records:
        place = f"{record.id}#{record.number}"
        if record.vector is None or not np.isfinite(record.vector).all():
            yield f"I4: the vector of {place} is none"
        elif abs(float(np.linalg.norm(record.vector)) - 1) > 1e-3:
            yield f"I4: the vector of {place} has not length 1"
        elif float(record.vector @ fresh[record.text or ""]) < 0.99999:
            yield f"I4: the vector of {place} is that of another text"


def settled(stored: Stored, truth: Truth, ids: Iterable[str]) -> Iterator[str]:
    """I5, the checkpoint is never ahead of the data: the rows it speaks of are stored as they are now, or set aside,
    or not there because they must not be."""
    for id_ in ids:
        wanted = None if id_ in truth.poison else truth.wanted.get(id_)
        there = id_ in stored.documents
        if wanted is None:
            if there:
                yield f"I5: {id_} is stored, and by the checkpoint it is known to be gone or unusable"
        elif not there:
            if id_ not in stored.quarantined:
                yield f"I5: {id_} is not stored, and the checkpoint is ahead of it"
        elif stored.as_wanted(id_) != wanted:
            yield f"I5: {id_} is stored as it was, and the checkpoint is ahead of it"


def converged(stored: Stored, truth: Truth) -> Iterator[str]:
    """After a full run: I1 complete, I2 no orphan, I4 the text of now; quarantine holds the poison and nothing else."""
    live = truth.wanted.keys() - truth.poison
    there = stored.documents.keys()
    yield from (f"I1: {id_} is missing" for id_ in sorted(live - there))
    yield from (f"I2: {id_} is an orphan" for id_ in sorted(there - live))
    yield from (f"I4: {id_} is stale" for id_ in sorted(there & live) if stored.as_wanted(id_) != truth.wanted[id_])
    if stored.quarantined != truth.poison & truth.wanted.keys():
        yield f"I1: quarantine holds {sorted(stored.quarantined)}, not {sorted(truth.poison & truth.wanted.keys())}"


def accounted(report: Mapping[str, Any]) -> Iterator[str]:
    """I7: every row that was read went exactly one way."""
    ways = ("upserted", "unchanged", "empty", "quarantined", "superseded")
    if report["read"] != sum(report[way] for way in ways):
        yield f"I7: {report['read']} rows read are not {[(way, report[way]) for way in ways]}"


def none(violations: Iterable[str], saying: str = "") -> None:
    """Fails with all of them; `saying` tells how to see it again."""
    found: Collection[str] = list(violations)
    assert not found, "\n".join([*found, saying])

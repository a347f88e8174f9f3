"""Whatever is wrong with whichever rows, every row read is accounted for, and no bad row stops another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st

from connector.errors import RowRejected, RowsRejected, TextsNotEmbeddable
from connector.model import ChangeSet, Lease
from connector.stores.local.store import LocalStore
from connector.sync.run import Ends, sync
from connector.sync.verify import verify
from tests.connector.test_sync import MANY_DELETES, SPEC, add_up, stored

ATTEMPTS = 2


class Kind(Enum):
    """What a row is like; the word stands in its text, so that the stages know it."""

    GOOD = "good"
    LONG = "one two three four five six seven"
    BLANK = "blank"
    RENDER = "its metadata are too many"
    KEY = "its key is too long"
    REFUSED = "refused by the model"
    NAN = "nan from the model"
    STORE = "unnamed by the store"
    NAMED = "named by the store"
    MISNAMED = "another named by the store"
    METADATA = "metadata refused by the store"

    @property
    def bad(self) -> bool:
        return self not in (Kind.GOOD, Kind.LONG, Kind.BLANK)


class Embedder:
    def __init__(self, embedder) -> None:
        self._embedder = embedder

    def __getattr__(self, name: str):
        return getattr(self._embedder, name)

    def embed_documents(self, texts: Sequence[str]) -> np.ndarray:
        bad = [place for place, text in enumerate(texts) if "refused by" in text]
        if bad:
            raise TextsNotEmbeddable("not finite", indices=bad)
        vectors = np.array(self._embedder.embed_documents(texts))
        vectors[[place for place, text in enumerate(texts) if "nan from" in text]] = np.nan
        return vectors

    def embed_counted(self, texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        return self.embed_documents(texts), self._embedder.count_tokens(texts)


class Store:
    def __init__(self, store: LocalStore) -> None:
        self._store = store

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def apply(self, lease: Lease, changes: ChangeSet) -> None:
        rows = [*changes.chunks, *changes.metadata_only]
        bad = {
            place: str(row.metadata["MTART"]) for place, row in enumerate(rows) if " by the store" in str(row.metadata)
        }
        if any("unnamed" in says for says in bad.values()):
            raise RowRejected("a row is too long", code=274)
        if bad:
            places = [place + ("another" in says) for place, says in bad.items()]
            raise RowsRejected("rows are too long", rows=dict.fromkeys(places, RowRejected("too long", code=274)))
        self._store.apply(lease, changes)


def row_of(number: int, kind: Kind, version: int) -> tuple[tuple[str, str], dict[str, str]]:
    """METADATA is bad from its second version on, which differs in the metadata alone."""
    key = "K" * 2100 if kind is Kind.KEY else "M"
    text = {Kind.BLANK: " ", Kind.LONG: f"{kind.value} {number} {version}"}.get(kind, f"{number} {kind.value[:12]}")
    metadata = "FERT"
    if kind is Kind.RENDER:
        metadata = "x" * 200_000
    elif kind in (Kind.STORE, Kind.NAMED, Kind.MISNAMED) or (kind is Kind.METADATA and version):
        metadata = f"{kind.value} {version}"
    return ("100", f"{key}{number:03}"), {"MAKTX": text, "MTART": metadata}


EVERY = dict(enumerate(list(Kind) * 2))
tables = st.dictionaries(st.integers(0, 30), st.sampled_from(Kind), max_size=25)


examples = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
given_tables = given(first=tables, second=tables, page=st.integers(1, 9), window=st.integers(1, 30))


@settings(max_examples=6, **examples)
@example(first=EVERY, second=EVERY, page=3, window=4)
@given_tables
def test_every_row_is_accounted_for_and_no_bad_row_stops_another(first, second, page, window, make_ends):
    accounted_for(first, second, page, window, make_ends())


@pytest.mark.slow
@settings(max_examples=400, **examples)
@given_tables
def test_every_row_is_accounted_for_at_length(first, second, page, window, make_ends):
    accounted_for(first, second, page, window, make_ends())


def accounted_for(first: dict[int, Kind], second: dict[int, Kind], page: int, window: int, plain: Ends) -> None:
    """Two states of a table, each synced until its bad rows are given up."""
    ends = Ends(plain.source, Store(plain.store), Embedder(plain.embedder))
    options = replace(MANY_DELETES, page_rows=page, window=window, max_attempts=ATTEMPTS)
    for version, state in enumerate((first, second)):
        plain.source.data = dict(row_of(number, kind, version) for number, kind in state.items())
        for attempt in range(1, ATTEMPTS + 2):
            report = sync(SPEC, ends, options)
            note(f"version {version}, attempt {attempt}: {report.as_dict()}")
            bad = {n for n, kind in state.items() if kind.bad and not (kind is Kind.METADATA and not version)}
            blank = sum(kind is Kind.BLANK for kind in state.values())
            assert add_up(report)
            assert report.read == len(state)
            assert (report.quarantined, report.empty) == (len(bad), blank)
            assert report.upserted + report.unchanged == len(state) - len(bad) - blank
            assert len(stored(plain.store)) == len(state) - len(bad) - blank
            assert len(plain.store.quarantine(SPEC.name)) == len(bad)
        assert (report.upserted, report.embedded_texts) == (0, 0), "after the last attempt nothing is left to do"
        assert verify(SPEC, ends).ok
    plain.store.close()

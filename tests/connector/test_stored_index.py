"""The index of what the store holds: positions, row digests, what was not seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.document.document import content_hash
from connector.model import Document, StoredChunk
from connector.sync import stored_index
from connector.sync.decide import Action, decide
from connector.sync.stored_index import StoredIndex


def document(id_: str, text: bytes = b"t" * 16, meta: bytes = b"m" * 16) -> Document:
    return Document(id_, "text", {}, text, meta)


def chunks(doc: Document, total: int) -> list[StoredChunk]:
    return [StoredChunk(n, doc.id, n, content_hash(doc, n, total) + b"vvvvvvvv") for n in range(total)]


def test_a_damaged_hash_harms_only_its_own_document():
    a, b = document("a"), document("b")
    broken = StoredChunk(9, "a", 0, b"short")
    index = StoredIndex([[broken, *chunks(b, 1)]])
    at_a, at_b = index.positions(["a", "b"]).tolist()
    assert decide(index.hashes(at_a), a) is Action.REPLACE
    assert decide(index.hashes(at_b), b) is Action.KEEP


def test_chunks_are_found_in_any_order():
    doc = document("a")
    assert decide(StoredIndex([chunks(doc, 5)[::-1]]).hashes(0), doc) is Action.KEEP


@settings(max_examples=50)
@given(
    stored=st.lists(st.text(max_size=5), unique=True, max_size=50),
    read=st.lists(st.text(max_size=5), unique=True, max_size=50),
    page=st.integers(1, 7),
)
def test_unseen_is_set_difference(stored, read, page):
    pages = [
        [chunks(document(id_), 1)[0] for id_ in stored[start : start + page]] for start in range(0, len(stored), page)
    ]
    index = StoredIndex(pages)
    index.mark_seen(index.positions(read))
    assert len(index) == len(stored)
    assert sorted(index.unseen(stored + read)) == sorted(set(stored) - set(read))


def stored_rows(doc: Document, numbers: list[int], total: int) -> list[StoredChunk]:
    return [
        StoredChunk(at, doc.id, number, content_hash(doc, number, total) + b"v" * 8)
        for at, number in enumerate(numbers)
    ]


@settings(max_examples=50)
@given(
    documents=st.dictionaries(
        st.text(max_size=3),
        st.tuples(
            st.binary(min_size=8, max_size=8), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 4)
        ),
        max_size=8,
    ),
    asked=st.lists(st.tuples(st.text(max_size=3), st.binary(min_size=8, max_size=8), st.booleans()), max_size=12),
    page=st.integers(1, 5),
)
def test_a_row_is_the_same_only_if_its_document_is_whole(documents, asked, page):
    """`same_rows` says of every id what the stored chunks say: numbered 0, 1, 2 ... once each, all of that row, as many
    as there were."""
    stored = [
        chunk
        for id_, (digest, numbers, total) in documents.items()
        for chunk in stored_rows(Document(id_, "t", {}, b"t" * 16, b"m" * 16, digest), numbers, total)
    ]
    index = StoredIndex([stored[start : start + page] for start in range(0, len(stored), page)])
    ids = [id_ for id_, _, _ in asked]
    digests = [documents[id_][0] if own and id_ in documents else other for id_, other, own in asked]
    expected = [
        id_ in documents
        and documents[id_][0] == digest != bytes(8)
        and sorted(documents[id_][1]) == list(range(documents[id_][2]))
        for id_, digest in zip(ids, digests, strict=True)
    ]
    assert index.same_rows(index.positions(ids), digests).tolist() == expected


@pytest.mark.parametrize("halves", [1, pytest.param(2, marks=pytest.mark.slow)])
@given(
    stored=st.lists(st.integers(0, 40), unique=True, max_size=30),
    read=st.lists(st.integers(0, 60), unique=True, max_size=30),
)
def test_digests_that_share_their_first_half_are_told_apart(halves, stored, read):
    """That takes 2**32 documents, so the digests are made for it here: `halves` different first halves."""

    def hashed(ids: list[str]) -> np.ndarray:
        return np.array([(int(id_) % halves, int(id_)) for id_ in ids], dtype=stored_index._KEY)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_index, "_hashed", hashed)
        index = StoredIndex([[chunk for id_ in stored for chunk in chunks(document(str(id_)), 2)]])
        assert len(index) == len(stored)
        found = dict(zip(read, index.positions([str(id_) for id_ in read]).tolist(), strict=True))
        assert {id_ for id_, position in found.items() if position >= 0} == set(stored) & set(read)
        assert len({position for position in found.values() if position >= 0}) == len(set(stored) & set(read))
        for id_, position in found.items():
            action = decide(index.hashes(position), document(str(id_)))
            assert action is (Action.KEEP if id_ in stored else Action.ADD)

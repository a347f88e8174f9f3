"""`decide` as a table: what is stored of a document, what the source says now, and the action."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from connector.document.document import content_hash
from connector.model import Document, StoredChunk
from connector.sync.decide import Action, content_digest, decide, decide_again, rehashed
from connector.sync.stored_index import StoredIndex

NOW = Document("a", "text", {"MTART": "FERT"}, b"t" * 16, b"m" * 16, b"r" * 8)
EMPTY = replace(NOW, text="")
OTHER_TEXT = replace(NOW, text_digest=b"T" * 16)
OTHER_METADATA = replace(NOW, meta_digest=b"M" * 16)
OTHER_ROW = replace(NOW, row_digest=b"R" * 8)


def stored(document: Document, total: int, numbers: Sequence[int] | None = None) -> list[bytes | None]:
    """The hashes of a document written as `total` chunks, of which the store has `numbers`."""
    whole = [StoredChunk(n, document.id, n, content_hash(document, n, total) + b"vvvvvvvv") for n in range(total)]
    return StoredIndex([[whole[n] for n in (range(total) if numbers is None else numbers)]]).hashes(0)


@pytest.mark.parametrize(
    ("found", "document", "action"),
    [
        ([], NOW, Action.ADD),
        ([], EMPTY, Action.IGNORE),
        (stored(NOW, 1), EMPTY, Action.REMOVE),
        (stored(NOW, 1), NOW, Action.KEEP),
        (stored(NOW, 2), NOW, Action.KEEP),
        (stored(NOW, 5), NOW, Action.KEEP),
        (stored(OTHER_ROW, 2), NOW, Action.REHASH),
        (stored(OTHER_METADATA, 2), NOW, Action.METADATA),
        (stored(replace(OTHER_METADATA, row_digest=b"R" * 8), 2), NOW, Action.METADATA),
        (stored(OTHER_TEXT, 2), NOW, Action.REPLACE),
        (stored(replace(OTHER_TEXT, meta_digest=b"M" * 16), 2), NOW, Action.REPLACE),
        (stored(NOW, 3, [0]), NOW, Action.REPLACE),
        (stored(NOW, 3, [1]), NOW, Action.REPLACE),
        (stored(NOW, 3, [0, 0]), NOW, Action.REPLACE),
        (stored(NOW, 3, [0, 1, 1]), NOW, Action.REPLACE),
        (stored(NOW, 3, [1, 2]), NOW, Action.REPLACE),
        ([b"short".ljust(32, b"\0")], NOW, Action.REPLACE),
    ],
)
def test_decide(found: list[bytes | None], document: Document, action: Action) -> None:
    assert decide(found, document) is action


@pytest.mark.parametrize(
    ("written", "document", "action"),
    [
        (None, NOW, Action.REPLACE),
        (None, EMPTY, Action.IGNORE),
        (content_digest(NOW), NOW, Action.KEEP),
        (content_digest(NOW), EMPTY, Action.REMOVE),
        (content_digest(OTHER_TEXT), NOW, Action.REPLACE),
        (content_digest(OTHER_METADATA), NOW, Action.REPLACE),
        (content_digest(OTHER_ROW), NOW, Action.REPLACE),
    ],
)
def test_decide_again(written: bytes | None, document: Document, action: Action) -> None:
    assert decide_again(written, document) is action


def test_new_metadata_keep_the_digest_of_the_vector() -> None:
    assert [chunk.content_hash for chunk in rehashed(stored(OTHER_METADATA, 2), NOW)] == [
        content_hash(NOW, number, 2) + b"vvvvvvvv" for number in range(2)
    ]

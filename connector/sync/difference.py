"""What the store holds against what the source says, without sorting: two databases collate differently, so the merge
goes by digests of document ids in a compact in-memory index. Knows neither SQL nor embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from connector.document.document import content_hash, fold
from connector.model import Chunk, Document, StoredChunk

_KEY = np.dtype([("high", "<u8"), ("low", "<u8")])
"""A digest of 16 bytes as two numbers: searching those is five times as fast as searching bytes."""
_HASH_BYTES = 32
_HASH = np.dtype(f"V{_HASH_BYTES}")
_NO_ROW = 0
_TEXT, _META, _ROW, _VECTOR = slice(0, 8), slice(8, 16), slice(16, 24), slice(24, 32)


def id_digest(document_id: str) -> bytes:
    """16 bytes; 2**64 documents would be needed for an even chance of one collision."""
    return blake2b(document_id.encode(), digest_size=16).digest()


class Difference(Enum):
    """What has to happen to a document."""

    NEW = "new"
    SAME = "same"
    ROW = "row"
    """As rendered nothing differs, but the row was read as something else: only the hash is written anew."""
    METADATA = "metadata"
    """Text, chunking and model are as stored; only the metadata differ: nothing to embed."""
    CHANGED = "changed"


class StoredIndex:
    """Identity and content hash of every chunk of ours: 52 bytes a chunk plus 33 a document, whatever the texts.

    `StoredIndex(store.stored(name))` reads the store once. `seen` remembers which documents the source still has.
    """

    def __init__(self, pages: Iterable[Sequence[StoredChunk]]) -> None:
        keys, numbers, hashes = _columns(pages)
        order = np.lexsort((numbers, keys["low"], keys["high"]))
        keys, self._numbers = keys[order], numbers[order]
        self._hashes = hashes[order]
        del hashes, order
        starts = np.ones(len(keys), dtype=np.bool_)
        starts[1:] = keys[1:] != keys[:-1]
        first = np.flatnonzero(starts)
        self._high = np.ascontiguousarray(keys["high"][first])
        self._low = np.ascontiguousarray(keys["low"][first])
        self._first = np.append(first, len(keys)).astype(np.int64)
        self._rows = self._row_digests()
        self.seen: NDArray[np.bool_] = np.zeros(len(self._high), dtype=np.bool_)

    def __len__(self) -> int:
        """Documents, not chunks."""
        return len(self._high)

    def positions(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """For each id its position in the index, -1 where the store has none."""
        if not ids or not len(self._high):
            return np.full(len(ids), -1, dtype=np.int64)
        wanted = np.frombuffer(b"".join(map(id_digest, ids)), dtype=_KEY)
        high, low = wanted["high"], wanted["low"]
        found = np.searchsorted(self._high, high).astype(np.int64)
        # Halves that several documents share are as good as never met, and still must not mislead.
        while True:
            inside = np.minimum(found, len(self._high) - 1)
            alike = (found < len(self._high)) & (self._high[inside] == high)
            further = alike & (self._low[inside] < low)
            if not further.any():
                return np.where(alike & (self._low[inside] == low), found, np.int64(-1))
            found[further] += 1

    def _row_digests(self) -> NDArray[np.uint64]:
        """By document; a torn or doubled one gets a value that no row has reason to equal."""
        if not len(self._high):
            return np.empty(0, np.uint64)
        words = self._hashes.view("<u8").reshape(-1, 4)[:, 2]
        counts = np.diff(self._first)
        starts = self._first[:-1]
        places = np.arange(len(words)) - np.repeat(starts, counts)
        intact = (self._numbers == places) & (words == np.repeat(words[starts], counts))
        whole = np.logical_and.reduceat(intact, starts)
        folds = (counts - 1).astype(np.uint64) * np.uint64(fold(2))
        return np.where(whole, words[starts] ^ folds, np.uint64(_NO_ROW)).astype(np.uint64)

    def same_rows(self, positions: NDArray[np.int64], digests: Sequence[bytes]) -> NDArray[np.bool_]:
        """For each row digest whether the document at that position was written from such a row, and is whole."""
        if not len(self._high) or not len(positions):
            return np.zeros(len(positions), dtype=np.bool_)
        given = np.frombuffer(b"".join(digests), dtype="<u8")
        same: NDArray[np.bool_] = (positions >= 0) & (self._rows[positions] == given) & (given != _NO_ROW)
        return same

    def mark_seen(self, positions: NDArray[np.int64]) -> None:
        self.seen[positions[positions >= 0]] = True

    def mark_unseen(self, position: int) -> None:
        self.seen[position] = False

    def unseen(self, ids: Sequence[str]) -> list[str]:
        """Those of `ids` that are in the index and were not marked."""
        positions = self.positions(ids)
        return [id_ for id_, position in zip(ids, positions, strict=True) if position >= 0 and not self.seen[position]]

    def compare(self, document: Document, position: int) -> Difference:
        """`position` as `positions` gave it. Chunk numbers that are not 0, 1, 2 ... once each count as changed."""
        if position < 0:
            return Difference.NEW
        metadata_same, row_same = True, True
        for number, stored in enumerate(self._stored(position)):
            if stored is None:
                return Difference.CHANGED
            expected = content_hash(document, number, self._total(position))
            if stored[_TEXT] != expected[_TEXT]:
                return Difference.CHANGED
            metadata_same = metadata_same and stored[_META] == expected[_META]
            row_same = row_same and stored[_ROW] == expected[_ROW]
        if not metadata_same:
            return Difference.METADATA
        return Difference.SAME if row_same else Difference.ROW

    def metadata_chunks(self, document: Document, position: int) -> list[Chunk]:
        """The chunks of a METADATA or ROW difference: new metadata and hash, the vector's digest kept, no text."""
        total = self._total(position)
        return [
            Chunk(
                document.id,
                number,
                "",
                document.metadata,
                content_hash(document, number, total) + (stored or b"")[_VECTOR],
            )
            for number, stored in enumerate(self._stored(position))
        ]

    def _total(self, position: int) -> int:
        return int(self._first[position + 1] - self._first[position])

    def _stored(self, position: int) -> Iterator[bytes | None]:
        start = int(self._first[position])
        for number in range(self._total(position)):
            at = start + number
            intact = int(self._numbers[at]) == number
            yield self._hashes[at].tobytes() if intact else None


def _columns(
    pages: Iterable[Sequence[StoredChunk]],
) -> tuple[NDArray[np.void], NDArray[np.int32], NDArray[np.void]]:
    keys, numbers, hashes = [np.empty(0, _KEY)], [np.empty(0, np.int32)], [np.empty(0, _HASH)]
    for page in filter(None, pages):
        _, ids, page_numbers, page_hashes = zip(*page, strict=True)
        keys.append(np.frombuffer(b"".join(map(id_digest, ids)), dtype=_KEY))
        numbers.append(np.array(page_numbers, dtype=np.int32))
        if set(map(len, page_hashes)) != {_HASH_BYTES}:
            page_hashes = tuple(map(_padded, page_hashes))
        hashes.append(np.frombuffer(b"".join(page_hashes), dtype=_HASH))
    return np.concatenate(keys), np.concatenate(numbers), np.concatenate(hashes)


def _padded(digest: bytes) -> bytes:
    """A hash somebody damaged must not shift its neighbours; cut or filled, it simply differs."""
    return digest if len(digest) == _HASH_BYTES else digest[:_HASH_BYTES].ljust(_HASH_BYTES, b"\0")

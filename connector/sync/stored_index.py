"""An in-memory index of the store's content by digests of document ids. Two databases sort differently, so compare
source and store by digests instead of merging sorted keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from connector.document.document import fold
from connector.model import StoredChunk

_KEY = np.dtype([("high", "<u8"), ("low", "<u8")])  # 16 bytes as two numbers, which are searched five times as fast
_HASH_BYTES = 32
_HASH = np.dtype(f"V{_HASH_BYTES}")
_NO_ROW = 0


def id_digest(document_id: str) -> bytes:
    """Return a 16-byte digest; a collision has even odds at about 2**64 documents."""
    return blake2b(document_id.encode(), digest_size=16).digest()


def _hashed(ids: Sequence[str]) -> NDArray[np.void]:
    """Return a 16-byte hash of each id, for this process only: two of Python's keyed hashes, which are seven times as
    fast as `id_digest`."""
    keys = np.empty(len(ids), _KEY)
    keys["high"] = np.fromiter(map(hash, ids), np.int64, len(ids)).view(np.uint64)
    keys["low"] = np.fromiter([hash(id_ + "\0") for id_ in ids], np.int64, len(ids)).view(np.uint64)
    return keys


class StoredIndex:
    """Ids and content hashes of our stored chunks: 52 bytes per chunk and 33 per document.

    `StoredIndex(store.stored(name))` reads the store once. `seen` marks the documents that the source still has.
    """

    def __init__(self, pages: Iterable[Sequence[StoredChunk]]) -> None:
        columns = [(np.empty(0, _KEY), np.empty(0, np.int32), np.empty(0, _HASH))]
        for page in filter(None, pages):
            _, ids, page_numbers, page_hashes = zip(*page, strict=True)
            if set(map(len, page_hashes)) != {_HASH_BYTES}:
                # A damaged hash must not shift its neighbours; padded or cut, it never matches.
                page_hashes = tuple(digest[:_HASH_BYTES].ljust(_HASH_BYTES, b"\0") for digest in page_hashes)
            page_keys = _hashed(ids)
            page_array = np.frombuffer(b"".join(page_hashes), dtype=_HASH)
            columns.append((page_keys, np.array(page_numbers, dtype=np.int32), page_array))
        keys, numbers, hashes = map(np.concatenate, zip(*columns, strict=True))
        del columns
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
        # Row digests by document; _NO_ROW for missing or duplicate chunks.
        self._rows = np.empty(0, np.uint64)
        if len(first):
            words = self._hashes.view("<u8").reshape(-1, 4)[:, 2]
            counts = np.diff(self._first)
            places = np.arange(len(words)) - np.repeat(first, counts)
            intact = (self._numbers == places) & (words == np.repeat(words[first], counts))
            folds = (counts - 1).astype(np.uint64) * np.uint64(fold(2))
            self._rows = np.where(np.logical_and.reduceat(intact, first), words[first] ^ folds, np.uint64(_NO_ROW))
        self.seen: NDArray[np.bool_] = np.zeros(len(self._high), dtype=np.bool_)

    def __len__(self) -> int:
        """Count documents, not chunks."""
        return len(self._high)

    def positions(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """Return the position of each id; -1 if not stored."""
        if not ids or not len(self._high):
            return np.full(len(ids), -1, dtype=np.int64)
        wanted = _hashed(ids)
        high, low = wanted["high"], wanted["low"]
        found = np.searchsorted(self._high, high).astype(np.int64)
        while True:  # documents that share the upper half are very rare: step over them singly
            inside = np.minimum(found, len(self._high) - 1)
            alike = (found < len(self._high)) & (self._high[inside] == high)
            further = alike & (self._low[inside] < low)
            if not further.any():
                return np.where(alike & (self._low[inside] == low), found, np.int64(-1))
            found[further] += 1

    def same_rows(self, positions: NDArray[np.int64], digests: Sequence[bytes]) -> NDArray[np.bool_]:
        """Return, per row digest, whether the document at that position is intact and was written from that row."""
        if not len(self._high) or not len(positions):
            return np.zeros(len(positions), dtype=np.bool_)
        given = np.frombuffer(b"".join(digests), dtype="<u8")
        same: NDArray[np.bool_] = (positions >= 0) & (self._rows[positions] == given) & (given != _NO_ROW)
        return same

    def mark_seen(self, positions: NDArray[np.int64]) -> None:
        self.seen[positions[positions >= 0]] = True

    def unseen(self, ids: Sequence[str]) -> list[str]:
        """Return the `ids` that are in the index and not marked as seen."""
        positions = self.positions(ids)
        return [id_ for id_, position in zip(ids, positions, strict=True) if position >= 0 and not self.seen[position]]

    def hashes(self, position: int) -> list[bytes | None]:
        """Return the hashes of a document's chunks for `decide`; [] at position -1."""
        if position < 0:
            return []
        chunks = range(int(self._first[position]), int(self._first[position + 1]))
        return [
            self._hashes[at].tobytes() if int(self._numbers[at]) == number else None for number, at in enumerate(chunks)
        ]

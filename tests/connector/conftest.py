"""Small honest emulators for the ends of a sync: a table in memory and an embedder of words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from connector.errors import TextsNotEmbeddable
from connector.model import Column, Key, KeyRange, Query, Row, Table, TableRef, Value
from connector.stores.local.store import LocalStore
from connector.sync.run import Ends

MATERIALS = TableRef("S", "MARA")


class MemorySource:
    """A table as a dict from key to values, read in key order. `before_page` is called before each page is cut."""

    def __init__(
        self, key: tuple[str, ...] = ("MANDT", "MATNR"), columns: tuple[str, ...] = ("MAKTX", "MTART")
    ) -> None:
        self.table = Table(
            MATERIALS,
            tuple(Column(name, "NVARCHAR", 40) for name in key + columns),
            primary_key=key,
        )
        self.data: dict[Key, dict[str, Value]] = {}
        self.pages_read = 0
        self.fail_after_pages: int | None = None

    def put(self, *key: str, **values: Value) -> None:
        self.data[key] = values

    def describe(self, ref: TableRef) -> Table:
        assert ref == MATERIALS
        return self.table

    def now(self) -> datetime:
        return datetime.now(UTC)

    def count(self, query: Query) -> int:
        return len(self.data)

    def pages(self, query: Query, size: int, within: KeyRange | None = None) -> Iterator[list[Row]]:
        keys = sorted(self.data, key=lambda key: tuple(str(part) for part in key))
        for start in range(0, len(keys), size):
            if self.fail_after_pages is not None and self.pages_read >= self.fail_after_pages:
                raise ConnectionResetError("the line went dead")
            self.pages_read += 1
            yield self.rows(query, keys[start : start + size])

    def rows(self, query: Query, keys: Sequence[Key]) -> list[Row]:
        return [
            Row(
                key,
                dict(zip(self.table.primary_key, key, strict=True)) | {n: None for n in query.columns} | self.data[key],
            )
            for key in keys
            if key in self.data
        ]


class WordEmbedder:
    """One token a word; each word a fixed random direction, a text the normalised sum. Records every text given."""

    dimension = 16
    model = "words"
    max_tokens = 8
    least_cosine = 0.999
    database_model = None

    def __init__(self, fingerprint: str = "words-1") -> None:
        self.fingerprint = fingerprint
        self.texts: list[str] = []
        self.refuse: set[str] = set()

    def embed_documents(self, texts: Sequence[str]) -> np.ndarray:
        bad = [index for index, text in enumerate(texts) if text in self.refuse]
        if bad:
            raise TextsNotEmbeddable("not finite", indices=bad)
        self.texts += texts
        return np.stack([self.embed_query(text) for text in texts])

    def embed_counted(self, texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        return self.embed_documents(texts), self.count_tokens(texts)

    def embed_query(self, text: str) -> np.ndarray:
        words = text.lower().split() or ["<empty>"]
        total = np.sum([self._direction(word) for word in words], axis=0)
        return (total / np.linalg.norm(total)).astype(np.float32)

    def _direction(self, word: str) -> np.ndarray:
        seed = int.from_bytes(blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
        direction: np.ndarray = np.random.default_rng(seed).standard_normal(self.dimension)
        return direction

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    def split(self, text: str, max_tokens: int, overlap: int) -> list[str]:
        spans = [match.span() for match in re.finditer(r"\S+", text)]
        step = max(1, max_tokens - overlap)
        starts = range(0, max(1, len(spans) - overlap), step)
        pieces = [spans[start : start + max_tokens] for start in starts]
        return [text[piece[0][0] : piece[-1][1]] for piece in pieces]


@pytest.fixture
def source() -> MemorySource:
    return MemorySource()


@pytest.fixture
def embedder() -> WordEmbedder:
    return WordEmbedder()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    store = LocalStore(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
def ends(source: MemorySource, store: LocalStore, embedder: WordEmbedder) -> Ends:
    return Ends(source, store, embedder)


@pytest.fixture
def make_embedder() -> type[WordEmbedder]:
    return WordEmbedder


@pytest.fixture
def make_ends(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Ends]:
    """Fresh ends for each example of a property test."""
    return lambda: Ends(MemorySource(), LocalStore(tmp_path_factory.mktemp("store") / "s"), WordEmbedder())

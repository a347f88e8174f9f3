"""Sample a whole table: texts as a sync would embed them, and a template's results, without reading every row."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np

from connector.document.document import Renderer
from connector.errors import RowRejected
from connector.model import CollectionSpec, Document, KeyRange
from connector.protocols import Embedder, Source

T = TypeVar("T")
PARTS = 32  # ranges of keys that are read in a large table
SPARE = 2  # rows to read per wanted text: some are blank or duplicates
FARTHEST = 16  # the most rows to read per wanted text: nearly all may be blank
PREVIEWED = 200  # approximate number of rows that a preview renders
_PREVIEW_PARTS = 8
BUCKETS = (16, 32, 64, 128, 256, 512)  # upper bounds of a histogram; one more bucket is open-ended


class Reservoir(Generic[T]):
    """A random sample of the items added so far, always the same for the same items."""

    def __init__(self, size: int) -> None:
        self.items: list[T] = []
        self._size = size
        self._seen = 0
        self._random = random.Random(0)

    def add(self, item: T) -> None:
        self._seen += 1
        if len(self.items) < self._size:
            self.items.append(item)
        elif (place := self._random.randrange(self._seen)) < self._size:
            self.items[place] = item


def sample_texts(spec: CollectionSpec, source: Source, embedder: Embedder, count: int) -> list[str]:
    """Return up to `count` different texts of chunks, in key order, always the same for the same rows.

    Reads `SPARE` rows per text, spread over the table, and up to `FARTHEST` if rows are blank or duplicates. Skips rows
    that cannot be rendered. Raises what a sync would raise before writing.
    """
    if count < 1:
        return []
    renderer = Renderer(spec, source.describe(spec.source), embedder)
    ranges, share = _divided(source, renderer, SPARE * count, PARTS)
    parts = [_documents(source, renderer, part, share) for part in ranges]
    texts: list[dict[str, None]] = [{} for _ in parts]
    distinct: list[str] = []
    for _ in range(FARTHEST // SPARE):
        for part, found in zip(parts, texts, strict=True):
            documents = [document for document in islice(part, share) if document is not None]
            for chunks in renderer.chunks_of(documents):
                found |= dict.fromkeys(chunk.text for chunk in chunks)
        distinct = list(dict.fromkeys(text for found in texts for text in found))
        if len(distinct) >= count:
            break
    places = random.Random(23).sample(range(len(distinct)), min(count, len(distinct)))
    return [distinct[place] for place in sorted(places)]


def preview(spec: CollectionSpec, source: Source, embedder: Embedder, samples: int) -> dict[str, Any]:
    """Render about PREVIEWED rows from the whole table, always the same for the same rows. Reads a table of up to twice
    as many rows completely. Costs HANA one count and a few pages. Raises what a sync would raise before writing.

    Returns `sampled`: rows read; `empty`: without text; `unreadable`: not renderable; `histogram`: rows with text by
    tokens; `chunked`: rows cut into several chunks; `truncated`: rows that would still lose text; `samples`: some
    texts, with their tokens without special ones.
    """
    renderer = Renderer(spec, source.describe(spec.source), embedder)
    ranges, share = _divided(source, renderer, PREVIEWED, _PREVIEW_PARTS)
    read = [each for part in ranges for each in islice(_documents(source, renderer, part, share), share)]
    documents = [document for document in read if document is not None]
    filled = [document for document in documents if not document.empty]
    texts = [document.text for document in filled]
    tokens = embedder.count_tokens(texts) if texts else []
    chunked = [[chunk.text for chunk in chunks] for chunks in renderer.chunks_of(filled)]
    distinct = [{"text": text, "tokens": count} for text, count in dict(zip(texts, tokens, strict=True)).items()]
    shown = min(samples, len(distinct))
    return {
        "samples": [distinct[len(distinct) * number // shown] for number in range(shown)],
        "histogram": _histogram(tokens),
        "sampled": len(read),
        "empty": len(documents) - len(filled),
        "unreadable": len(read) - len(documents),
        "chunked": sum(len(chunks) > 1 for chunks in chunked),
        "truncated": sum(max(embedder.count_tokens(chunks)) > embedder.max_tokens for chunks in chunked),
    }


def _divided(source: Source, renderer: Renderer, wanted: int, parts: int) -> tuple[Sequence[KeyRange | None], int]:
    """Return key ranges, and how many rows to read of each for `wanted` rows; a small table is read whole."""
    rows = source.count(renderer.query)
    if rows <= SPARE * wanted:
        return [None], max(1, rows)
    ranges = source.ranges(renderer.query, parts, rows)
    return ranges, -(-wanted // len(ranges))


def _documents(source: Source, renderer: Renderer, part: KeyRange | None, share: int) -> Iterator[Document | None]:
    """Yield the documents of a key range; None for a row that cannot be rendered."""
    for page in source.pages(renderer.query, min(1000, share), part):
        for row in page:
            try:
                yield renderer.document(row)
            except RowRejected:
                yield None


def _histogram(tokens: Sequence[int]) -> dict[str, int]:
    """Return the number of texts by tokens: "0-16", "17-32" ... "513+"."""
    counts = np.bincount(np.searchsorted(BUCKETS, tokens), minlength=len(BUCKETS) + 1)
    lows = (0, *(end + 1 for end in BUCKETS))
    names = [*(f"{low}-{end}" for low, end in zip(lows, BUCKETS, strict=False)), f"{lows[-1]}+"]
    return dict(zip(names, counts.tolist(), strict=True))

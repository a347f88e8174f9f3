"""Sample a whole table: texts as a sync would embed them, and a template's results, without reading every row."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, Generic, TypeVar

import numpy as np

from connector.document.document import Renderer
from connector.errors import RowRejected
from connector.model import CollectionSpec, Document, Row
from connector.protocols import Embedder, Source

T = TypeVar("T")
PARTS = 32  # ranges of keys that are read in a large table
SPARE = 4  # rows to read per wanted text: many may be blank or duplicates
FARTHEST = 16  # the most rows to read per wanted text: nearly all may be blank
PREVIEWED = 200  # approximate number of rows that a preview renders
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
    that cannot be rendered. Raises the errors that a sync raises before writing.
    """
    if count < 1:
        return []
    renderer = Renderer(spec, source.describe(spec.source), embedder)
    parts, share = _documents(source, renderer, SPARE * count, PARTS)
    texts: list[dict[str, None]] = [{} for _ in parts]
    distinct: list[str] = []
    for _ in range(FARTHEST // SPARE):
        for part, found in zip(parts, texts, strict=True):
            documents = [document for document in islice(part, share) if document is not None]
            for chunks in renderer.chunks_of(documents):
                found |= dict.fromkeys(chunk.text for chunk in chunks)
        distinct = list(dict.fromkeys(chain.from_iterable(texts)))
        if len(distinct) >= count:
            break
    # Take equally many texts from each part; if a part has too few, take more from the others.
    chosen = dict.fromkeys(text for found in texts for text in _some(list(found), -(-count // len(texts))))
    others = [text for text in distinct if text not in chosen]
    wanted = {*_some(list(chosen), count), *_some(others, max(0, count - len(chosen)))}
    return [text for text in distinct if text in wanted]


def _some(texts: Sequence[str], count: int) -> list[str]:
    """Return a random choice, always the same for the same texts, in order."""
    places = random.Random(23).sample(range(len(texts)), min(count, len(texts)))
    return [texts[place] for place in sorted(places)]


def preview(spec: CollectionSpec, source: Source, embedder: Embedder, samples: int) -> dict[str, Any]:
    """Render about PREVIEWED rows from the whole table, always the same for the same rows. Reads a table of up to twice
    as many rows completely. Costs HANA one count and a few pages. Raises the errors that a sync raises before writing.

    Returns `sampled`: rows read; `empty`: without text; `unreadable`: not renderable; `histogram`: rows with text by
    tokens; `chunked`: rows cut into several chunks; `truncated`: rows with a chunk too long for the model;
    `samples`: some texts, with their tokens without special ones.
    """
    renderer = Renderer(spec, source.describe(spec.source), embedder)
    parts, share = _documents(source, renderer, PREVIEWED, 8)
    read = [each for part in parts for each in islice(part, share)]
    documents = [document for document in read if document is not None]
    filled = [document for document in documents if not document.empty]
    texts = [document.text for document in filled]
    tokens = embedder.count_tokens(texts) if texts else []
    chunked = [[chunk.text for chunk in chunks] for chunks in renderer.chunks_of(filled)]
    distinct = [{"text": text, "tokens": count} for text, count in dict(zip(texts, tokens, strict=True)).items()]
    shown = min(samples, len(distinct))
    counts = np.bincount(np.searchsorted(BUCKETS, tokens), minlength=len(BUCKETS) + 1)
    lows = (0, *(end + 1 for end in BUCKETS))
    names = [*(f"{low}-{end}" for low, end in zip(lows, BUCKETS, strict=False)), f"{lows[-1]}+"]
    return {
        "samples": [distinct[len(distinct) * number // shown] for number in range(shown)],
        "histogram": dict(zip(names, counts.tolist(), strict=True)),
        "sampled": len(read),
        "empty": len(documents) - len(filled),
        "unreadable": len(read) - len(documents),
        "chunked": sum(len(chunks) > 1 for chunks in chunked),
        "truncated": sum(max(embedder.count_tokens(chunks)) > embedder.max_tokens for chunks in chunked),
    }


def _documents(
    source: Source, renderer: Renderer, wanted: int, parts: int
) -> tuple[list[Iterator[Document | None]], int]:
    """Return the documents of each of `parts` key ranges, None for a row that cannot be rendered, and how many to read
    from each range for `wanted` in total. A table of up to 2 x `wanted` rows is one range, to be read whole."""

    def document(row: Row) -> Document | None:
        try:
            return renderer.document(row)
        except RowRejected:
            return None

    rows = source.count(renderer.query)
    whole = rows <= 2 * wanted
    ranges = [None] if whole else source.ranges(renderer.query, parts, rows)
    share = rows if whole else -(-wanted // len(ranges))
    pages = [source.pages(renderer.query, min(1000, max(1, share)), part) for part in ranges]
    return [map(document, chain.from_iterable(each)) for each in pages], share

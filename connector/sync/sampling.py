"""Sample texts from a whole table, as a sync would embed them, without reading every row."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from connector.document import lengths
from connector.document.document import Renderer
from connector.errors import RowRejected
from connector.model import CollectionSpec, Document, KeyRange, Row
from connector.protocols import Embedder, Source

PARTS = 32  # ranges of keys that are read in a large table
SPARE = 2  # rows to read per wanted text: some are blank or duplicates
FARTHEST = 16  # the most rows to read per wanted text: nearly all may be blank
_SEED = 23


def sample_texts(spec: CollectionSpec, source: Source, embedder: Embedder, count: int) -> list[str]:
    """Return up to `count` different texts of chunks, in key order, always the same for the same rows.

    Reads `SPARE` rows per text, spread over the table, and up to `FARTHEST` if rows are blank or duplicates. Skips rows
    that cannot be rendered. Raises what a sync would raise before writing.
    """
    if count < 1:
        return []
    renderer = Renderer(spec, source.describe(spec.source), embedder)
    rows = source.count(renderer.query)
    if rows <= SPARE * count:
        return _some(list(_Part(renderer, source, None).read(rows)), count)
    parts = [_Part(renderer, source, part) for part in source.ranges(renderer.query, PARTS, rows)]
    share = -(-SPARE * count // len(parts))
    for _ in range(max(1, FARTHEST // SPARE)):
        for part in parts:
            part.read(share)
        if len({text for part in parts for text in part.texts}) >= count:
            break
    return _evenly([list(part.texts) for part in parts], count)


PREVIEWED = 200  # approximate number of rows that a preview renders
_PLACES = 8  # ranges of keys that a preview reads


@dataclass(frozen=True, slots=True)
class SampledText:
    """`tokens`: without special tokens."""

    text: str
    tokens: int


@dataclass(slots=True)
class Preview:
    """A template's results for some rows. `sampled`: rows read; `empty`: without text; `unreadable`: not renderable.
    `histogram`: rows with text by tokens; `chunked`: rows cut into several chunks; `truncated`: rows that would still
    lose text."""

    samples: list[SampledText] = field(default_factory=list)
    histogram: dict[str, int] = field(default_factory=dict)
    sampled: int = 0
    empty: int = 0
    unreadable: int = 0
    chunked: int = 0
    truncated: int = 0


def preview(spec: CollectionSpec, source: Source, embedder: Embedder, samples: int) -> Preview:
    """Render about PREVIEWED rows from the whole table, always the same for the same rows. Reads a table of up to twice
    as many rows completely. Costs HANA one count and a few pages. Raises what a sync would raise before writing."""
    renderer = Renderer(spec, source.describe(spec.source), embedder)
    rows = source.count(renderer.query)
    whole = rows <= SPARE * PREVIEWED
    ranges = [None] if whole else source.ranges(renderer.query, _PLACES, rows)
    share = max(1, rows if whole else PREVIEWED // len(ranges))
    found = Preview()
    documents: list[Document] = []
    for part in ranges:
        pages = source.pages(renderer.query, min(1000, share), part)
        for row in islice((row for page in pages for row in page), share):
            found.sampled += 1
            try:
                documents.append(renderer.document(row))
            except RowRejected:
                found.unreadable += 1
    filled = [document for document in documents if not document.empty]
    found.empty = len(documents) - len(filled)
    texts = [document.text for document in filled]
    tokens = embedder.count_tokens(texts) if texts else []
    found.histogram = lengths.named(lengths.counted(tokens))
    for chunks in renderer.chunks_of(filled):
        found.chunked += len(chunks) > 1
        found.truncated += max(embedder.count_tokens([chunk.text for chunk in chunks])) > embedder.max_tokens
    distinct = [SampledText(text, count) for text, count in dict(zip(texts, tokens, strict=True)).items()]
    shown = min(samples, len(distinct))
    found.samples = [distinct[len(distinct) * number // shown] for number in range(shown)]
    return found


class _Part:
    """A key range, read step by step. `texts`: of the rows so far, in key order."""

    def __init__(self, renderer: Renderer, source: Source, part: KeyRange | None) -> None:
        self._renderer = renderer
        self._source = source
        self._range = part
        self._documents: Iterator[Document | None] | None = None
        self.texts: dict[str, None] = {}

    def read(self, rows: int) -> dict[str, None]:
        """Read up to `rows` more rows."""
        if self._documents is None:
            pages = self._source.pages(self._renderer.query, min(1000, max(1, rows)), self._range)
            self._documents = _documents(self._renderer, pages)
        documents = [document for document in islice(self._documents, rows) if document is not None]
        for chunks in self._renderer.chunks_of(documents):
            self.texts |= dict.fromkeys(chunk.text for chunk in chunks)
        return self.texts


def _evenly(texts: Sequence[Sequence[str]], count: int) -> list[str]:
    """Return equally many of each part; if a part has too few, more of the others."""
    chosen = dict.fromkeys(text for part in texts for text in _some(part, -(-count // len(texts))))
    others = dict.fromkeys(text for part in texts for text in part if text not in chosen)
    wanted = set(_some(list(chosen), count)) | set(_some(list(others), max(0, count - len(chosen))))
    return list(dict.fromkeys(text for part in texts for text in part if text in wanted))


def _documents(renderer: Renderer, pages: Iterator[list[Row]]) -> Iterator[Document | None]:
    """Yield documents; None for a row that cannot be rendered."""
    for page in pages:
        for row in page:
            try:
                yield renderer.document(row)
            except RowRejected:
                yield None


def _some(texts: Sequence[str], count: int) -> list[str]:
    """Return a reproducible random choice, in order."""
    if len(texts) <= count:
        return list(texts)
    places = sorted(random.Random(_SEED).sample(range(len(texts)), count))
    return [texts[place] for place in places]

"""Texts from all over a table, as a sync would embed them, without reading all of it. Knows the protocols of
`protocols.py` only.
"""

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

PARTS = 32
"""Places of the key space that are looked at in a large table, each for a border and a page."""
SPARE = 2
"""Rows read for each text that is wanted: some are blank or alike."""
FARTHEST = 16
"""Rows read for each text that is wanted, at most: a table may be blank nearly everywhere."""
_SEED = 23


def sample_texts(spec: CollectionSpec, source: Source, embedder: Embedder, count: int) -> list[str]:
    """Up to `count` different texts of chunks, in key order, always the same for the same rows. A table of up to
    `SPARE` times as many rows is read whole, and of a larger one as much, spread over all of it; where that gives too
    few texts, because rows are blank or alike, up to `FARTHEST` rows for each text. Rows that cannot be rendered are
    passed over.

    Raises what a sync would before it writes.
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


PREVIEWED = 200
"""Rows that a preview renders, about."""
_PLACES = 8
"""Of the key space that a preview looks at."""


@dataclass(frozen=True, slots=True)
class SampledText:
    """`tokens`: without special tokens."""

    text: str
    tokens: int


@dataclass(slots=True)
class Preview:
    """What a template makes of some rows. `sampled`: rows that were rendered, of which `empty` have no text and
    `unreadable` could not be. `histogram`: rows with text by tokens; `chunked`: those that would be cut into several
    chunks; `truncated`: those that would lose text all the same."""

    samples: list[SampledText] = field(default_factory=list)
    histogram: dict[str, int] = field(default_factory=dict)
    sampled: int = 0
    empty: int = 0
    unreadable: int = 0
    chunked: int = 0
    truncated: int = 0


def preview(spec: CollectionSpec, source: Source, embedder: Embedder, samples: int) -> Preview:
    """Render about PREVIEWED rows from all over the table, always the same for the same rows; a table of up to twice as
    many is read whole. Costs HANA one count, and for a large table a page at each of a few places.

    Raises what a sync would before it writes.
    """
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
    _measure(found, renderer, filled, embedder)
    found.samples = _spread(found.samples, samples)
    return found


def _measure(found: Preview, renderer: Renderer, documents: Sequence[Document], embedder: Embedder) -> None:
    texts = [document.text for document in documents]
    tokens = embedder.count_tokens(texts) if texts else []
    found.samples = [SampledText(text, count) for text, count in zip(texts, tokens, strict=True)]
    found.histogram = lengths.named(lengths.counted(tokens))
    for chunks in renderer.chunks_of(documents):
        found.chunked += len(chunks) > 1
        found.truncated += max(embedder.count_tokens([chunk.text for chunk in chunks])) > embedder.max_tokens


def _spread(texts: Sequence[SampledText], count: int) -> list[SampledText]:
    """Different ones, from the first to the last."""
    distinct = list({each.text: each for each in texts}.values())
    if len(distinct) <= count:
        return distinct
    return [distinct[len(distinct) * number // count] for number in range(count)]


class _Part:
    """A range of keys, read as far as texts are wanted. `texts`: of the rows so far, in key order."""

    def __init__(self, renderer: Renderer, source: Source, part: KeyRange | None) -> None:
        self._renderer = renderer
        self._source = source
        self._range = part
        self._documents: Iterator[Document | None] | None = None
        self.texts: dict[str, None] = {}

    def read(self, rows: int) -> dict[str, None]:
        """`rows` more of them, or as many as there are."""
        if self._documents is None:
            pages = self._source.pages(self._renderer.query, min(1000, max(1, rows)), self._range)
            self._documents = _documents(self._renderer, pages)
        documents = [document for document in islice(self._documents, rows) if document is not None]
        for chunks in self._renderer.chunks_of(documents):
            self.texts |= dict.fromkeys(chunk.text for chunk in chunks)
        return self.texts


def _evenly(texts: Sequence[Sequence[str]], count: int) -> list[str]:
    """As many of each part; where parts have too few, the rest out of the others."""
    chosen = dict.fromkeys(text for part in texts for text in _some(part, -(-count // len(texts))))
    others = dict.fromkeys(text for part in texts for text in part if text not in chosen)
    wanted = set(_some(list(chosen), count)) | set(_some(list(others), max(0, count - len(chosen))))
    return list(dict.fromkeys(text for part in texts for text in part if text in wanted))


def _documents(renderer: Renderer, pages: Iterator[list[Row]]) -> Iterator[Document | None]:
    """None for a row that cannot be rendered."""
    for page in pages:
        for row in page:
            try:
                yield renderer.document(row)
            except RowRejected:
                yield None


def _some(texts: Sequence[str], count: int) -> list[str]:
    """Drawn at random, but always the same, in their order."""
    if len(texts) <= count:
        return list(texts)
    places = sorted(random.Random(_SEED).sample(range(len(texts)), count))
    return [texts[place] for place in places]

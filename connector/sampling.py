"""Texts from all over a table, as a sync would embed them, without reading all of it. Knows the protocols of
`protocols.py` only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from connector import lengths
from connector.document import Renderer
from connector.errors import RowRejected
from connector.model import CollectionSpec, Document, KeyRange, Row
from connector.protocols import Embedder, Source

PARTS = 32
"""Places of the key space that are looked at in a large table, each for a border and a page."""
SPARE = 2
"""Rows read for each text that is wanted: some are blank or alike."""
_SEED = 23


def sample_texts(spec: CollectionSpec, source: Source, embedder: Embedder, count: int) -> list[str]:
    """Up to `count` different texts of chunks, in key order, always the same for the same rows; fewer where there are
    no more. A table of up to `SPARE` times as many rows is read whole. Rows that cannot be rendered are passed over.

    Raises what a sync would before it writes.
    """
    if count < 1:
        return []
    renderer = Renderer(spec, source.describe(spec.source), embedder)
    rows = source.count(renderer.query)
    whole = rows <= SPARE * count
    ranges = [None] if whole else source.ranges(renderer.query, PARTS, rows)
    share = rows if whole else -(-SPARE * count // len(ranges))
    texts: dict[str, None] = {}
    for part in ranges:
        found = _texts(renderer, source, part, share)
        texts |= dict.fromkeys(found if whole else _some(found, -(-count // len(ranges))))
    return _some(list(texts), count)


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


def _texts(renderer: Renderer, source: Source, part: KeyRange | None, rows: int) -> list[str]:
    """Of the first `rows` rows of a range."""
    pages = source.pages(renderer.query, min(1000, max(1, rows)), part)
    documents = list(islice(_documents(renderer, pages), rows))
    chunks = renderer.chunks_of(documents)
    return list(dict.fromkeys(chunk.text for of_document in chunks for chunk in of_document))


def _documents(renderer: Renderer, pages: Iterator[list[Row]]) -> Iterator[Document]:
    for page in pages:
        for row in page:
            try:
                yield renderer.document(row)
            except RowRejected:
                continue


def _some(texts: Sequence[str], count: int) -> list[str]:
    """Drawn at random, but always the same, in their order."""
    if len(texts) <= count:
        return list(texts)
    places = sorted(random.Random(_SEED).sample(range(len(texts)), count))
    return [texts[place] for place in places]

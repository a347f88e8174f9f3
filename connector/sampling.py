"""Texts from all over a table, as a sync would embed them, without reading all of it. Knows the protocols of
`protocols.py` only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice

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

"""What is stored, to be read: rows by their ids, the metadata that filters can be made of, and rows as points on a map.
Knows the parts and who may see which rows; no HTTP and no terminal.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from difflib import get_close_matches
from functools import partial
from itertools import groupby
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from app.src.access.rows import Nothing, seen
from app.src.service.serving import Serving, in_one_generation
from app.src.service.single_flight_cache import Bounds, Remembered, seen_of
from app.src.service.wiring import Parts
from connector.model import CollectionSpec, CollectionStatus, Filter, Sample, Scalar, StoredText

SAMPLE = 5000
"""Rows that fields are told of at most, and a map is made of."""
MOST_IDS = 100
MOST_CHARACTERS = 16 << 20
"""Of the texts of several rows together, which are all in memory, twice, until they are sent."""
_IDS_AT_ONCE = 8
VALUES = 50
"""Of a field, the most frequent ones."""
REMEMBERED = Bounds(most=64, seconds=5.0)
"""Fields, of collections and of what may be seen of them."""
LONGEST_VALUE = 200
"""Characters of a value that somebody may choose from a list; longer ones only count as more."""
POINTS = 1000
_ALL_THE_SAME = 1e-10
"""Variance of unit vectors that differ by the noise of float32 alone."""
_LARGEST = sys.float_info.max
"""JSON has integers without an end, which no filter compares."""
_DIGITS = 6
_TITLE = 80
"""Characters."""
_PROBE = 24
"""Characters of a beginning that are looked for before all of it is compared."""
_DAY = re.compile(r"(\d{4}-\d{2}-\d{2})([ T][\d:.,+Z -]{0,40})?", re.ASCII)
"""Short and without words: the smallest and the largest are shown whole."""

FieldType = Literal["text", "number", "boolean", "mixed"]


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A row as it is stored. `text`: its chunks put together where they overlap; `key` as a `FoundHit` has it."""

    id: str
    key: Mapping[str, Any]
    text: str
    metadata: Mapping[str, Any]
    chunks: list[str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FieldValue:
    value: Scalar
    count: int


@dataclass(frozen=True, slots=True)
class Field:
    """A metadata field. `values`: up to VALUES, the most frequent first; `more`: there are others. `min`, `max`: of
    numbers, and of texts that all are ISO dates or times; else None."""

    name: str
    type: FieldType
    values: list[FieldValue]
    more: bool
    min: str | float | int | None = None
    max: str | float | int | None = None


@dataclass(frozen=True, slots=True)
class Fields:
    """Of `sampled` rows of the `rows` that the asker may see: declared metadata in its order, then what else there
    is."""

    fields: list[Field]
    sampled: int
    rows: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Point:
    """A row on the map. `color`: its value of the field that was asked for; `title`: its first words."""

    id: str
    x: float
    y: float
    color: Scalar
    title: str


@dataclass(frozen=True, slots=True)
class PointMap:
    """`explained`: the shares of all differences between the `sampled` vectors that x and y show, of `rows` rows that
    the asker may see."""

    points: list[Point]
    explained: tuple[float, float]
    sampled: int
    rows: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Browsing:
    """Thread-safe. `within` is what `access.rows.visible` says of who asks."""

    def __init__(self, parts: Parts, serving: Serving) -> None:
        self._parts = parts
        self._serving = serving
        self._fields: Remembered[Fields] = Remembered(REMEMBERED)

    def written(self, name: str) -> None:
        """Its rows have changed."""
        self._fields.written(name)

    def rows(self, spec: CollectionSpec, ids: Sequence[str], within: Filter | Nothing | None) -> list[ReadRow]:
        """In the order of `ids`, each once. What is not there and what may not be seen is left out alike. Raises
        UnknownCollection, and ValueError for more than MOST_IDS and for several rows of more than MOST_CHARACTERS."""
        if len(ids) > MOST_IDS:
            raise ValueError(f"{len(ids)} ids; at most {MOST_IDS} at a time")

        from connector.sync.documents import readable_ids

        wanted = list(dict.fromkeys(readable_ids(spec, ids)))

        def read(stored: CollectionStatus) -> list[ReadRow]:
            if isinstance(within, Nothing):
                return []
            found = self._texts_of(stored, wanted, within)
            columns = self._serving.key_columns(spec, stored) if found else ()
            overlapping = spec.chunk.overlap > 0
            rows: dict[str, ReadRow] = {}
            for _, chunks in groupby(found, key=lambda text: text.id):
                row = _row(spec, list(chunks), columns, overlapping=overlapping)
                rows.setdefault(row.id, row)
            return list(rows.values())

        return [] if self._serving.never_written(spec) else in_one_generation(self._serving, spec.name, read)

    def _texts_of(self, stored: CollectionStatus, ids: Sequence[str], within: Filter | None) -> list[StoredText]:
        """A few rows at a time, so that no more is read than may be shown."""
        found: list[StoredText] = []
        characters = 0
        for start in range(0, len(ids), _IDS_AT_ONCE):
            some = ids[start : start + _IDS_AT_ONCE]
            read = seen(self._parts.store.view(stored.collection, stored.generation, within).texts(some), within)
            characters += sum(len(text.text) for text in read)
            if characters > MOST_CHARACTERS and len({text.id for text in (*found[:1], *read)}) > 1:
                raise ValueError(
                    f"the texts of these rows are longer than {MOST_CHARACTERS} characters together: ask for fewer ids"
                )
            found += read
        return found

    def example_id(self, spec: CollectionSpec) -> str | None:
        """Return the id of any stored row as people are shown it, None where there is none."""
        from connector.sync.documents import shown_id

        def read(stored: CollectionStatus) -> str | None:
            chosen = self._parts.store.view(spec.name, stored.generation).sample(1).chosen
            return shown_id(spec, chosen[0].id) if chosen else None

        return None if self._serving.never_written(spec) else in_one_generation(self._serving, spec.name, read)

    def fields(self, spec: CollectionSpec, within: Filter | Nothing | None) -> Fields:
        """Of a large collection REMEMBERED.seconds old at most: it takes a look at every row. Raises
        UnknownCollection."""
        from connector.document.document import metadata_names

        declared = list(metadata_names(spec.metadata).values())
        if self._serving.never_written(spec):
            return Fields([_field(name, Counter()) for name in declared], 0, 0)

        def read(stored: CollectionStatus) -> Fields:
            if isinstance(within, Nothing):
                return Fields([_field(name, Counter()) for name in declared], 0, 0)
            look = partial(looked_at, stored, within)
            # A small collection is looked at in no time, and always anew.
            return self._fields.get(seen_of(stored, within), look, lasts=lambda known: known.sampled < known.rows)

        def looked_at(stored: CollectionStatus, within: Filter | None) -> Fields:
            sample = self._parts.store.view(spec.name, stored.generation, within).sample(SAMPLE, texts=False)
            chosen = seen(sample.chosen, within)
            found = _values(declared, (text.metadata for text in chosen))
            rows = _rows(sample, chosen)
            return Fields([_field(name, values) for name, values in found.items()], len(chosen), rows)

        return in_one_generation(self._serving, spec.name, read)

    def map(self, spec: CollectionSpec, color: str | None, limit: int, within: Filter | Nothing | None) -> PointMap:
        """Up to `limit` rows as points: their first chunks' vectors, seen from where SAMPLE of them differ most. Raises
        UnknownCollection, and ValueError for a field `color` that neither is declared nor stands in a row that may be
        seen."""
        from connector.document.document import metadata_names

        names = metadata_names(spec.metadata)
        if isinstance(within, Nothing) or self._serving.never_written(spec):
            if not spec.written_by_clients:  # whose fields nobody has declared
                _known_field(color, names, ())
            return PointMap([], (0.0, 0.0), 0, 0)

        def read(stored: CollectionStatus) -> PointMap:
            store = self._parts.store
            sample = store.view(spec.name, stored.generation, within).sample(SAMPLE)
            rows = seen(sample.chosen, within)
            field = _known_field(color, names, rows)
            vectors = store.view(spec.name, stored.generation).vectors(rows)
            lengths = np.linalg.norm(vectors, axis=1)
            placed = np.flatnonzero(np.isfinite(lengths) & (lengths > 0))
            xy, explained = principal_plane(vectors[placed] / lengths[placed, None])
            points = [
                _point(spec, rows[place], at, field) for place, at in zip(placed[:limit], xy.tolist(), strict=False)
            ]
            return PointMap(points, explained, len(placed), _rows(sample, rows))

        return in_one_generation(self._serving, spec.name, read)


def _rows(sample: Sample, seen_of_it: Sequence[StoredText]) -> int:
    """A store that gave what may not be seen has counted it too."""
    return sample.rows if len(seen_of_it) == len(sample.chosen) else len(seen_of_it)


def _row(spec: CollectionSpec, chunks: Sequence[StoredText], columns: Sequence[str], *, overlapping: bool) -> ReadRow:
    from connector.document.document import parse_id
    from connector.stores.records import FOREIGN
    from connector.sync.documents import shown_id
    from connector.sync.quarantine import named_key

    first, texts = chunks[0], [chunk.text for chunk in chunks]
    key = {} if first.id.startswith(FOREIGN) else named_key(parse_id(first.id), columns)
    return ReadRow(shown_id(spec, first.id), key, joined(texts, overlapping=overlapping), first.metadata, texts)


def joined(texts: Sequence[str], *, overlapping: bool) -> str:
    """Pieces of a text, put together again. `overlapping`: each but the first begins before the end of the one before
    (`Embedder.split`), so where the end of what there is and the beginning of the next are alike, it stands there once.
    Texts that repeat themselves just there may lose a repetition."""
    whole = texts[0] if texts else ""
    for text in texts[1:]:
        whole += text[_alike(whole, text) :] if overlapping else text
    return whole


def _alike(whole: str, text: str) -> int:
    """How many characters the longest end of `whole` has that `text` begins with."""
    start = max(0, len(whole) - len(text)) - 1
    while (start := whole.find(text[:_PROBE], start + 1)) >= 0:
        if text.startswith(whole[start:]):
            return len(whole) - start
    return next((n for n in range(min(_PROBE, len(whole), len(text)), 0, -1) if whole.endswith(text[:n])), 0)


# ------------------------------------------------------------------------------------------------------------- fields

_Kind = type[bool] | type[float] | type[str]
_TYPES: Mapping[_Kind, FieldType] = {bool: "boolean", float: "number", str: "text"}
Values = Counter[tuple[_Kind, Any]]
"""How often each value is there. With its kind, because True and 1 are one key otherwise."""


def _values(declared: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> dict[str, Values]:
    """By field: the declared ones first, others by how many rows have them. What no filter compares is no value (null,
    an object, a list) and no field (a name that is no word)."""
    found: dict[str, Values] = {name: Counter() for name in declared}
    for metadata in rows:
        for name, value in metadata.items():
            kind = _kind(value)
            if kind is not None:
                found.setdefault(name, Counter())[kind, value] += 1
    others = sorted(
        (name for name in found if name not in declared and _is_word(name)),
        key=lambda name: (-found[name].total(), name),
    )
    return {name: found[name] for name in (*dict.fromkeys(declared), *others)}


def _kind(value: object) -> _Kind | None:
    if isinstance(value, bool):
        return bool
    if isinstance(value, int | float):
        return float if abs(value) <= _LARGEST else None
    return str if isinstance(value, str) else None


def _is_word(name: str) -> bool:
    from connector.errors import BadFilter
    from connector.stores.filters import parse

    try:
        parse({name: 1})
    except BadFilter:
        return False
    return True


def _field(name: str, values: Values) -> Field:
    kinds = {kind for kind, _ in values}
    ranked = sorted(values.items(), key=lambda item: (-item[1], str(item[0][1])))
    shown = [FieldValue(value, count) for (_, value), count in ranked if not _too_long(value)][:VALUES]
    least, most = _range(kinds, [value for _, value in values])
    kind: FieldType = "text" if not kinds else _TYPES[next(iter(kinds))] if len(kinds) == 1 else "mixed"
    return Field(name, kind, shown, len(shown) < len(values), least, most)


def _too_long(value: Scalar) -> bool:
    return isinstance(value, str) and len(value) > LONGEST_VALUE


def _range(kinds: set[_Kind], values: Sequence[Any]) -> tuple[Any, Any]:
    if kinds == {float} or (kinds == {str} and all(map(_is_time, values))):
        return min(values), max(values)
    return None, None


def _is_time(text: str) -> bool:
    found = _DAY.fullmatch(text)
    if found is None:
        return False
    try:
        date.fromisoformat(found[1])
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------------------- map


def principal_plane(vectors: NDArray[np.floating[Any]]) -> tuple[NDArray[np.float64], tuple[float, float]]:
    """The two principal components of `vectors` (n, d): coordinates (n, 2) and the share of the variance that each
    explains. Nothing where there are fewer than two vectors; zeros where all are the same.

    With X the centred vectors and X = U S V', the coordinates are X V = U S and the shares are s_i^2 / sum(s_j^2)
    (Jolliffe, Principal Component Analysis, 2nd edition, sections 1.1 and 3.5). V, or for few vectors U, comes from the
    eigenvectors of the smaller of X'X and XX': 5000 x 384 in a quarter of a second on two cores, a tenth of what the
    decomposition of X takes, and the two largest are exact to float32. Each axis is turned so that the point farthest
    out on it is positive (scikit-learn's svd_flip): the same vectors always give the same picture.
    """
    count, dimension = vectors.shape
    if count < 2:
        return np.zeros((0, 2)), (0.0, 0.0)
    centred = vectors.astype(np.float64)
    centred -= centred.mean(axis=0)
    if dimension <= count:
        values, axes = np.linalg.eigh(centred.T @ centred)
        found = centred @ axes[:, ::-1][:, :2]
    else:
        values, axes = np.linalg.eigh(centred @ centred.T)
        found = axes[:, ::-1][:, :2] * np.sqrt(np.maximum(values[::-1][:2], 0.0))
    whole = float(np.square(centred).sum())
    if whole < _ALL_THE_SAME * count:
        return np.zeros((count, 2)), (0.0, 0.0)
    xy = np.zeros((count, 2))
    xy[:, : found.shape[1]] = found
    farthest = xy[np.abs(xy).argmax(axis=0), (0, 1)]
    shares = np.square(xy).sum(axis=0) / whole
    return xy * np.where(farthest < 0, -1.0, 1.0), (float(shares[0]), float(shares[1]))


def _known_field(color: str | None, names: Mapping[str, str], rows: Iterable[StoredText]) -> str | None:
    """The name in the metadata of a field that is given by that name or its column's. Raises ValueError."""
    if color is None:
        return None
    field, there = names.get(color, color), set(names.values())
    if field in there or any(_kind(row.metadata.get(field)) is not None for row in rows):
        return field
    near = get_close_matches(color, sorted({*names, *there, *_names(rows)}), 1)
    hint = f'; did you mean "{near[0]}"?' if near else f"; declared are: {', '.join(names) or 'none'}"
    raise ValueError(f"color: no metadata field has this name{hint}")


def _names(rows: Iterable[StoredText]) -> set[str]:
    return {name for row in rows for name in row.metadata}


def _point(spec: CollectionSpec, row: StoredText, at: Sequence[float], field: str | None) -> Point:
    from connector.sync.documents import shown_id

    value = None if field is None else row.metadata.get(field)
    color = value if _kind(value) is not None else None
    return Point(shown_id(spec, row.id), round(at[0], _DIGITS), round(at[1], _DIGITS), color, _first_words(row.text))


def _first_words(text: str) -> str:
    flat = " ".join(text[: 4 * _TITLE].split())
    return flat if len(flat) <= _TITLE else f"{flat[:_TITLE].rsplit(' ', 1)[0]} ..."

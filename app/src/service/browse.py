"""Read what is stored, under row rights: rows by their ids, fields for filters, rows as points on a map."""

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

from app.src.access.principal import Principal
from app.src.access.rows import Nothing, Rights, seen
from app.src.service.collections import Collections
from app.src.service.single_flight_cache import Bounds, SingleFlightCache, key_of
from app.src.service.wiring import Parts
from connector.model import CollectionSpec, CollectionStatus, Filter, Sample, Scalar, StoredText

SAMPLE = 5000  # rows that fields and maps are made from, at most
MOST_IDS = 100
MOST_CHARACTERS = 16 << 20  # of the texts of several rows, which are in memory twice until they are sent
_IDS_AT_ONCE = 8
VALUES = 50  # of a field, the most frequent ones
REMEMBERED = Bounds(most=64, seconds=5.0)  # fields, by collection and row filter
LONGEST_VALUE = 200  # characters of a value in a list to choose from; longer ones only count as more
POINTS = 1000
_ALL_THE_SAME = 1e-10  # variance of unit vectors that differ only by float32 noise
_LARGEST = sys.float_info.max  # JSON allows larger integers, which no filter compares
_DIGITS = 6
_TITLE = 80  # characters
_PROBE = 24  # characters of a beginning that are searched before all of it is compared
# Short and without words: the smallest and the largest are shown whole.
_DAY = re.compile(r"(\d{4}-\d{2}-\d{2})([ T][\d:.,+Z -]{0,40})?", re.ASCII)

FieldType = Literal["text", "number", "boolean", "mixed"]


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A stored row. `text`: its chunks joined; `key` as in `FoundHit`."""

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
    numbers, and if all texts are ISO dates or times; else None."""

    name: str
    type: FieldType
    values: list[FieldValue]
    more: bool
    min: str | float | int | None
    max: str | float | int | None


@dataclass(frozen=True, slots=True)
class Fields:
    """Declared fields in their order, then others, in `sampled` of the `rows` that the caller may see."""

    fields: list[Field]
    sampled: int
    rows: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Point:
    """A row on the map. `color`: its value of the field asked for; `title`: its first words."""

    id: str
    x: float
    y: float
    color: Scalar
    title: str


@dataclass(frozen=True, slots=True)
class PointMap:
    """`explained`: the shares of the variance of the `sampled` vectors that x and y show. `rows`: visible to the
    caller."""

    points: list[Point]
    explained: tuple[float, float]
    sampled: int
    rows: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Browse:
    """Thread-safe. Raises UnknownCollection, also before the first sync. Invisible rows count as not stored."""

    def __init__(self, parts: Parts, collections: Collections, rights: Rights) -> None:
        self._parts = parts
        self._collections = collections
        self._rights = rights
        self._fields: SingleFlightCache[Fields] = SingleFlightCache(REMEMBERED)
        collections.on_change(self._fields.changed)

    def rows(self, name: str, ids: Sequence[str], *, principal: Principal) -> list[ReadRow]:
        """Return the rows with these ids, as search gives them, in that order, each once; unknown ids are left out.
        Raises ValueError for more than MOST_IDS, and for several rows of more than MOST_CHARACTERS."""
        spec, within = self._collections.spec(name), self._rights.visible(name, principal)
        if len(ids) > MOST_IDS:
            raise ValueError(f"{len(ids)} ids; at most {MOST_IDS} at a time")

        from connector.sync.documents import readable_ids

        wanted = list(dict.fromkeys(readable_ids(spec, ids)))

        def read(stored: CollectionStatus) -> list[ReadRow]:
            if isinstance(within, Nothing):
                return []
            found = self._texts_of(stored, wanted, within)
            columns = self._collections.key_columns(name, stored) if found else ()
            overlapping = spec.chunk.overlap > 0
            rows: dict[str, ReadRow] = {}
            for _, chunks in groupby(found, key=lambda text: text.id):
                row = _row(spec, list(chunks), columns, overlapping=overlapping)
                rows.setdefault(row.id, row)
            return list(rows.values())

        return [] if self._collections.is_empty(spec) else self._collections.in_one_generation(name, read)

    def _texts_of(self, stored: CollectionStatus, ids: Sequence[str], within: Filter | None) -> list[StoredText]:
        """Read a few rows at a time, to stop at MOST_CHARACTERS."""
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

    def example_id(self, name: str) -> str | None:
        """Return the id of any stored row, None if there is none. For the operator: row rights do not apply."""
        spec = self._collections.spec(name)
        from connector.sync.documents import shown_id

        def read(stored: CollectionStatus) -> str | None:
            chosen = self._parts.store.view(spec.name, stored.generation).sample(1).chosen
            return shown_id(spec, chosen[0].id) if chosen else None

        return None if self._collections.is_empty(spec) else self._collections.in_one_generation(name, read)

    def fields(self, name: str, *, principal: Principal) -> Fields:
        """Return the metadata that filters can use. For a large collection up to REMEMBERED.seconds old: it reads every
        row."""
        spec, within = self._collections.spec(name), self._rights.visible(name, principal)
        from connector.document.document import metadata_names

        declared = list(metadata_names(spec.metadata).values())
        if self._collections.is_empty(spec):
            return Fields([_field(name, Counter()) for name in declared], 0, 0)

        def read(stored: CollectionStatus) -> Fields:
            if isinstance(within, Nothing):
                return Fields([_field(name, Counter()) for name in declared], 0, 0)
            look = partial(looked_at, stored, within)
            # A small collection is read in no time, so it is not remembered.
            return self._fields.get(key_of(stored, within), look, lasts=lambda known: known.sampled < known.rows)

        def looked_at(stored: CollectionStatus, within: Filter | None) -> Fields:
            sample = self._parts.store.view(spec.name, stored.generation, within).sample(SAMPLE, texts=False)
            chosen = seen(sample.chosen, within)
            found = _values(declared, (text.metadata for text in chosen))
            rows = _rows(sample, chosen)
            return Fields([_field(name, values) for name, values in found.items()], len(chosen), rows)

        return self._collections.in_one_generation(name, read)

    def map(self, name: str, color: str | None = None, limit: int = POINTS, *, principal: Principal) -> PointMap:
        """Return up to `limit` rows as points: the vectors of their first chunks in the plane where SAMPLE of them
        differ most. Raises ValueError for a field `color` that is neither declared nor in a visible row."""
        spec, within = self._collections.spec(name), self._rights.visible(name, principal)
        from connector.document.document import metadata_names

        names = metadata_names(spec.metadata)
        if isinstance(within, Nothing) or self._collections.is_empty(spec):
            if not spec.written_by_clients:  # their fields are not declared
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

        return self._collections.in_one_generation(name, read)


def _rows(sample: Sample, seen_of_it: Sequence[StoredText]) -> int:
    """A store that wrongly gave invisible rows has counted them too."""
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
    """Join the chunks of a text. `overlapping`: each begins before the end of the one before (`Embedder.split`), so a
    common end and beginning is kept once; a text that repeats itself just there may lose a repetition."""
    whole = texts[0] if texts else ""
    for text in texts[1:]:
        whole += text[_alike(whole, text) :] if overlapping else text
    return whole


def _alike(whole: str, text: str) -> int:
    """Return the length of the longest end of `whole` that `text` begins with."""
    start = max(0, len(whole) - len(text)) - 1
    while (start := whole.find(text[:_PROBE], start + 1)) >= 0:
        if text.startswith(whole[start:]):
            return len(whole) - start
    return next((n for n in range(min(_PROBE, len(whole), len(text)), 0, -1) if whole.endswith(text[:n])), 0)


# ------------------------------------------------------------------------------------------------------------- fields

_Kind = type[bool] | type[float] | type[str]
_TYPES: Mapping[_Kind, FieldType] = {bool: "boolean", float: "number", str: "text"}
Values = Counter[tuple[_Kind, Any]]
"""How often each value occurs. With its kind, because True and 1 are one key otherwise."""


def _values(declared: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> dict[str, Values]:
    """Values by field: the declared fields first, others by how many rows have them. Leaves out what filters cannot
    compare (null, objects, lists) or name."""
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
    """Return the metadata name of a field given by that name or its column's. Raises ValueError."""
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

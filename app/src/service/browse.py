"""Read stored rows under row rights: rows by id, rows in an order, fields for filters, rows as points on a map."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from itertools import groupby, islice, product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from app.src.access.principal import Principal
from app.src.access.rows import Rights
from app.src.service.collections import Collections, VisibleView
from connector.document.document import metadata_names, named_key, parse_id
from connector.errors import BadFilter
from connector.model import CollectionSpec, CollectionStatus, Filter, Order, Place, Scalar, StoredText
from connector.stores.filters import parse, read_number
from connector.stores.records import FOREIGN, readable_ids, shown_id

SAMPLE = 5000  # most rows that fields and maps are computed from
MOST_IDS = 100
MOST_CHARACTERS = 16 << 20  # of several rows' texts together: they are in memory twice until sent
_IDS_AT_ONCE = 8, 256  # first, and most while their texts are short
_SHORT = 1 << 20  # characters of the rows read at once
KEY_ORDER = "key"
NUMBERS = frozenset({"TINYINT", "SMALLINT", "INTEGER", "BIGINT", "DECIMAL", "SMALLDECIMAL", "REAL", "DOUBLE"})
VALUES = 50  # values listed for a field, the most frequent ones
LONGEST_VALUE = 200  # characters; a longer value is not listed, only reported as `more`
POINTS = 1000
_ALL_THE_SAME = 1e-10  # variance below which unit vectors differ only by float32 noise
_LARGEST = sys.float_info.max  # JSON allows larger integers, but filters cannot compare them
_DIGITS = 6
_TITLE = 80  # characters
# Matches only short texts without words, because minimum and maximum are shown whole.
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


@dataclass(frozen=True, slots=True)
class Page:
    """Rows in an order. `next`: where the next page begins, as `Browse.page` takes it; None on the last page."""

    rows: list[ReadRow]
    next: str | None


@dataclass(frozen=True, slots=True)
class FieldValue:
    value: Scalar
    count: int


@dataclass(frozen=True, slots=True)
class Field:
    """A metadata field. `type` is number for columns of a numeric type, whose DECIMALs are stored as text. `values`: up
    to VALUES, the most frequent first; `more`: there are others. `min`, `max`: of numbers, and if all texts are ISO
    dates or times; else None."""

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


class Browse:
    """Thread-safe. Raises UnknownCollection, also before the first sync. Rows hidden from the caller count as not
    found."""

    def __init__(self, collections: Collections, rights: Rights) -> None:
        self._collections = collections
        self._rights = rights

    def rows(self, name: str, ids: Sequence[str], *, principal: Principal) -> list[ReadRow]:
        """Return the rows with these ids in order, each once; skip unknown ids. Raises ValueError for more than
        MOST_IDS, and for several rows with more than MOST_CHARACTERS together."""
        spec, within = self._collections.spec(name), self._rights.visible(name, principal)
        if len(ids) > MOST_IDS:
            raise ValueError(f"{len(ids)} ids; at most {MOST_IDS} at a time")
        wanted = list(dict.fromkeys(readable_ids(spec, ids)))

        def read(view: VisibleView, stored: CollectionStatus) -> list[ReadRow]:
            rows: dict[str, ReadRow] = {}
            characters = 0
            for _, row in self._read(spec, view, stored, wanted):
                characters += sum(map(len, row.chunks))
                if characters > MOST_CHARACTERS and rows:
                    raise ValueError(
                        f"the texts of these rows are longer than {MOST_CHARACTERS} characters together: ask for fewer "
                        "ids"
                    )
                rows.setdefault(row.id, row)
            return list(rows.values())

        return self._collections.read(name, within, read) or []

    def page(
        self,
        name: str,
        sort: str = KEY_ORDER,
        after: str | None = None,
        limit: int = 50,
        where: Filter | None = None,
        *,
        principal: Principal,
    ) -> Page:
        """Return up to `limit` rows that match `where`, behind `after` (the `next` of the page before). `sort`: "key"
        (the ids as text) or a metadata field, descending with a "-" before it; numbers sort as numbers, and rows
        without the field come last. A page is shorter if its texts have more than MOST_CHARACTERS together. Raises
        BadFilter, and ValueError for an unknown field or cursor."""
        spec, within = self._collections.spec(name), self._rights.visible(name, principal)
        start = None if after is None else _from_cursor(after, sort)

        def read(view: VisibleView, stored: CollectionStatus) -> Page:
            order, place = start or (self._order(spec, view, stored, sort), None)
            places = view.places(limit + 1, order, place, where)
            last = {place.id: number for number, place in enumerate(places[:limit])}
            rows: list[ReadRow] = []
            characters, end = 0, min(limit, len(places))
            for stored_id, row in self._read(spec, view, stored, list(last)):
                characters += sum(map(len, row.chunks))
                if characters > MOST_CHARACTERS and rows:
                    end = last[stored_id]
                    break
                rows.append(row)
            return Page(rows, _cursor(sort, order, places[end - 1]) if end < len(places) else None)

        return self._collections.read(name, within, read) or Page([], None)

    def columns(self, name: str, *, principal: Principal) -> tuple[Sequence[str], list[str]]:
        """Return the names of the key columns and of the metadata fields: the declared ones, then those in a sample of
        rows. A field that is also a key column is left out."""
        key = () if self._collections.spec(name).written_by_clients else self._collections.key_columns(name)
        return key, [each.name for each in self.fields(name, principal=principal).fields if each.name not in key]

    def _order(self, spec: CollectionSpec, view: VisibleView, stored: CollectionStatus, sort: str) -> Order:
        """Return the order that `sort` names. A field of a numeric column is sorted by numbers; one without a known
        column if all its sampled values are numbers."""
        descending, given = sort.startswith("-"), sort.removeprefix("-")
        names = metadata_names(spec.metadata)
        first_of_key = self._collections.key_columns(spec.name, stored)[:1]  # ids begin with its values
        if given == KEY_ORDER or (given in first_of_key and given not in names):
            return Order(descending=descending)
        field = names.get(given, given)
        if kind := _types(spec, stored).get(field):
            return Order(field, kind in NUMBERS, descending)
        rows = view.sample(SAMPLE, texts=False).chosen
        field = _known_field(given, names, rows, "sort")
        kinds = {_kind(row.metadata.get(field)) for row in rows} - {None}
        return Order(field, kinds == {"number"}, descending)

    def _read(
        self, spec: CollectionSpec, view: VisibleView, stored: CollectionStatus, ids: Sequence[str]
    ) -> Iterator[tuple[str, ReadRow]]:
        """Yield stored ids and rows, in the order of `ids`. Reads a few rows at a time, so that the caller can stop."""
        columns: tuple[str, ...] | None = None
        start, (size, most) = 0, _IDS_AT_ONCE
        while start < len(ids):
            found = view.texts(ids[start : start + size])
            if found and columns is None:
                columns = self._collections.key_columns(spec.name, stored)
            for stored_id, group in groupby(found, key=lambda text: text.id):
                chunks = list(group)
                texts, id_ = [chunk.text for chunk in chunks], shown_id(spec, stored_id)
                key = {} if stored_id.startswith(FOREIGN) else named_key(parse_id(stored_id), columns or ())
                text = joined(texts, overlapping=spec.chunk.overlap > 0)
                yield stored_id, ReadRow(id_, key, text, chunks[0].metadata, texts)
            start += size
            size = min(2 * size, most) if sum(len(text.text) for text in found) < _SHORT else _IDS_AT_ONCE[0]

    def fields(self, name: str, *, principal: Principal) -> Fields:
        """Return the metadata fields that filters can use. Reads every row of the collection."""
        spec, within = self._collections.spec(name), self._rights.visible(name, principal)
        declared = list(metadata_names(spec.metadata).values())

        def read(view: VisibleView, stored: CollectionStatus) -> Fields:
            sample = view.sample(SAMPLE, texts=False)
            numbers = {name for name, kind in _types(spec, stored).items() if kind in NUMBERS}
            rows = [dict(text.metadata) for text in sample.chosen]
            for row, name in product(rows, numbers):
                with suppress(ValueError):  # DECIMALs are stored as text
                    if isinstance(row.get(name), str):
                        row[name] = read_number(row[name])
            found = _values(declared, rows)
            return Fields([_field(name, values) for name, values in found.items()], len(sample.chosen), sample.rows)

        nothing = Fields([_field(name, Counter()) for name in declared], 0, 0)
        return self._collections.read(name, within, read) or nothing

    def map(self, name: str, color: str | None = None, limit: int = POINTS, *, principal: Principal) -> dict[str, Any]:
        """Return up to `limit` visible rows as `points`: id, x, y, `color` (the value of that field) and `title` (the
        first words). The plane is that of the largest variance among the vectors of SAMPLE rows' first chunks.
        `explained`: the share of the variance of the `sampled` vectors on each axis; `rows`: visible rows. Raises
        ValueError for a field `color` that is neither declared nor in a visible row."""
        spec, within = self._collections.spec(name), self._rights.visible(name, principal)
        names = metadata_names(spec.metadata)

        def read(view: VisibleView, _: CollectionStatus) -> dict[str, Any]:
            sample = view.sample(SAMPLE)
            rows = sample.chosen
            field = None if color is None else _known_field(color, names, rows, "color")
            vectors = view.vectors(rows)
            lengths = np.linalg.norm(vectors, axis=1)
            placed = np.flatnonzero(np.isfinite(lengths) & (lengths > 0))
            xy, explained = principal_plane(vectors[placed] / lengths[placed, None])
            points = []
            for place, (x, y) in zip(placed[:limit], xy.tolist(), strict=False):
                value = None if field is None else rows[place].metadata.get(field)
                title = " ".join(rows[place].text[: 4 * _TITLE].split())
                title = title if len(title) <= _TITLE else f"{title[:_TITLE].rsplit(' ', 1)[0]} ..."
                point = {"id": shown_id(spec, rows[place].id), "x": round(x, _DIGITS), "y": round(y, _DIGITS)}
                points.append(point | {"color": None if _kind(value) is None else value, "title": title})
            return {"points": points, "explained": explained, "sampled": len(placed), "rows": sample.rows}

        found = self._collections.read(name, within, read)
        if found is None:
            if color is not None and not spec.written_by_clients:  # fields that clients write are not declared
                _known_field(color, names, (), "color")
            found = {"points": [], "explained": (0.0, 0.0), "sampled": 0, "rows": 0}
        return found


def _types(spec: CollectionSpec, stored: CollectionStatus) -> dict[str, str]:
    """Return the types of the metadata's columns at the last sync, by metadata name, as far as known."""
    columns = stored.checkpoint.columns
    return {name: columns[column] for column, name in metadata_names(spec.metadata).items() if column in columns}


_CURSOR = TypeAdapter(tuple[str, str | None, bool, str | float | None, str])  # sort, field, numeric, value, id


def _cursor(sort: str, order: Order, place: Place) -> str:
    """Return a place as text for URLs."""
    text = json.dumps(
        [sort, order.field, order.numeric, place.value, place.id], separators=(",", ":"), ensure_ascii=False
    )
    return base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode().rstrip("=")


def _from_cursor(text: str, sort: str) -> tuple[Order, Place]:
    """Invert `_cursor`. The text may have been changed by a client, which can then only start elsewhere in the rows
    that it may see."""
    try:
        read = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
        given, field, numeric, value, id_ = _CURSOR.validate_json(read, strict=True)
        parse({"$and": [{"id": id_}, {field or "id": value}]})  # as strict as for texts and numbers of filters
        if isinstance(value, str if numeric else float):
            raise ValueError
    except (ValueError, BadFilter):
        raise ValueError("after: not a cursor; use `next` of a page, or leave it out for the first page") from None
    if given != sort:
        raise ValueError(f'after: this cursor belongs to sort={given}; use the same sort, or leave "after" out')
    return Order(field, numeric, sort.startswith("-")), Place(id_, value)


def joined(texts: Sequence[str], *, overlapping: bool) -> str:
    """Join the chunks of a text. `overlapping`: chunks overlap (`Embedder.split`), so keep each overlap once: the
    longest end of the text so far with which the next chunk begins. A text that repeats itself there may lose a
    repetition."""
    whole = ""
    for text in texts:
        same, start = 0, max(0, len(whole) - len(text)) - 1
        while overlapping and not same and (start := whole.find(text[:1], start + 1)) >= 0:
            same = (len(whole) - start) if text.startswith(whole[start:]) else 0
        whole += text[same:]
    return whole


Values = Counter[tuple[FieldType, Any]]
"""Number of occurrences by (kind, value). The kind separates True and 1, which are equal as keys."""


def _values(declared: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> dict[str, Values]:
    """Return values by field: declared fields first, others by frequency. Skip values that filters cannot compare
    (null, objects, lists) and fields that filters cannot name."""
    found: dict[str, Values] = {name: Counter() for name in declared}
    for metadata in rows:
        for name, value in metadata.items():
            kind = _kind(value)
            if kind is not None:
                found.setdefault(name, Counter())[kind, value] += 1
    others = []
    for name in found:
        if name not in declared:
            with suppress(BadFilter):
                parse({name: 1})
                others.append(name)
    others.sort(key=lambda name: (-found[name].total(), name))
    return {name: found[name] for name in (*dict.fromkeys(declared), *others)}


def _kind(value: object) -> FieldType | None:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number" if abs(value) <= _LARGEST else None
    return "text" if isinstance(value, str) else None


def _field(name: str, values: Values) -> Field:
    kinds = {kind for kind, _ in values}
    ranked = sorted(values.items(), key=lambda item: (-item[1], str(item[0][1])))
    short = (item for item in ranked if not (isinstance(item[0][1], str) and len(item[0][1]) > LONGEST_VALUE))
    shown = [FieldValue(value, count) for (_, value), count in islice(short, VALUES)]
    plain, ordered = [value for _, value in values], kinds == {"number"}
    if kinds == {"text"}:
        with suppress(ValueError):  # not all texts are dates
            ordered = all((day := _DAY.fullmatch(text)) and date.fromisoformat(day[1]) for text in plain)
    least, most = (min(plain), max(plain)) if ordered else (None, None)
    return Field(
        name, "mixed" if len(kinds) > 1 else next(iter(kinds), "text"), shown, len(shown) < len(values), least, most
    )


def principal_plane(vectors: NDArray[np.floating[Any]]) -> tuple[NDArray[np.float64], tuple[float, float]]:
    """Return the two principal components of `vectors` (n, d): coordinates (n, 2) and the share of the variance on each
    axis. Empty for fewer than two vectors, zeros if all are equal.

    With X the centred vectors and X = U S V', the coordinates are X V = U S and the shares are s_i^2 / sum(s_j^2)
    (Jolliffe, Principal Component Analysis, 2nd edition, sections 1.1 and 3.5). V, or for few vectors U, comes from the
    eigenvectors of the smaller of X'X and XX': ten times faster than a decomposition of X, and exact to float32. The
    farthest point on each axis is positive (scikit-learn's svd_flip), so that the result is deterministic.
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


def _known_field(given: str, names: Mapping[str, str], rows: Iterable[StoredText], parameter: str) -> str:
    """Return the metadata name of a field, given by that name or by its column. Raises ValueError."""
    field, declared = names.get(given, given), set(names.values())
    if field in declared or any(_kind(row.metadata.get(field)) is not None for row in rows):
        return field
    raise ValueError(f"{parameter}: no metadata field has this name; declared are: {', '.join(names) or 'none'}")

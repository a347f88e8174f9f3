"""Turn a row into a document and its chunks: rendered text, metadata, identity, digests."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from connector.document import values
from connector.document.chunking import Chunker
from connector.document.template import Template
from connector.errors import ConfigurationError, RowRejected
from connector.hana.catalog import VECTOR_TYPES, check_columns, resolve_key
from connector.model import Cells, Chunk, CollectionSpec, Column, Document, Key, Query, Row, Scalar, Table, Value
from connector.protocols import Embedder

__all__ = [
    "Renderer",
    "Template",
    "chunks",
    "content_hash",
    "document_id",
    "metadata_digest",
    "metadata_json",
    "metadata_names",
    "parse_id",
    "quarantine_id",
    "vector_digest",
]

LONGEST_ID = 2000  # SRC_KEY is NVARCHAR(2000), which counts UTF-16 units
LARGEST_METADATA = 100_000  # bytes of one row's metadata as JSON
UNREADABLE = VECTOR_TYPES | {"BLOB", "ST_GEOMETRY", "ST_POINT", "ARRAY"}
_FLOATS = frozenset({"DOUBLE", "REAL", "FLOAT"})
_DIGEST = 16
RENDERING = 1  # increase when this code renders the same row differently


# --------------------------------------------------------------------------------------------------------- identity


def document_id(key: Key) -> str:
    """Return the key as a canonical, compact JSON array, unique per key.

    Text, integers, booleans and NULL are plain JSON; floats have a point or exponent; other types are objects:
    {"decimal":"12.5"} {"date":..} {"time":..} {"datetime":..} {"bytes":"<hex>"}. Keys that SQL considers equal (1.50
    and 1.5, 0.0 and -0.0) have the same id. Raises RowRejected above 2000 characters, the length of SRC_KEY.
    """
    text = _encode(key)
    if len(text) > LONGEST_ID // 2 and _units(text) > LONGEST_ID:
        raise RowRejected(f"the key is {_units(text)} characters long as an id, at most {LONGEST_ID} fit SRC_KEY")
    return text


def quarantine_id(key: Key) -> str:
    """Return `document_id`, or a digest for a key that is too long, so that the row can be quarantined."""
    try:
        return document_id(key)
    except RowRejected:
        return orjson.dumps([{"digest": _hash(_safe_bytes(repr(key))).hex()}]).decode()


def parse_id(id: str) -> list[Value]:
    """Return the key values of a document id, with their types. Raises ValueError for anything else."""
    parsed = json.loads(id, object_hook=_untag)
    if not isinstance(parsed, list):
        raise ValueError(f"a document id is a JSON array, not {type(parsed).__name__}")
    return parsed


Plain = bool | int | float | str | None


def named_key(values: Sequence[Value], columns: Sequence[str]) -> dict[str, Plain]:
    """Return key values by column name, or by position if the names are unknown."""
    names = columns if len(columns) == len(values) else [str(position) for position in range(len(values))]
    return {name: _plain(value) for name, value in zip(names, values, strict=True)}


def _plain(value: Value) -> Plain:
    """Return a key value as JSON; types without a JSON form become text."""
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _encode(key: Key) -> str:
    for value in key:
        if value.__class__ is float:
            key = tuple(_plain_float(part) for part in key)
            break
    try:
        return orjson.dumps(key, default=_tag, option=orjson.OPT_PASSTHROUGH_DATETIME).decode()
    except orjson.JSONEncodeError as error:
        if isinstance(error.__cause__, RowRejected):
            raise error.__cause__ from None
        return _encode_odd(key)


def _encode_odd(key: Key) -> str:
    """Return the same form for what orjson rejects: unpaired surrogates (escaped) and integers beyond 64 bits."""
    text = json.dumps([_whole_pairs(value) for value in key], default=_tag, ensure_ascii=False, separators=(",", ":"))
    return re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match.group()):04x}", text)


def _whole_pairs(value: Value) -> Value:
    """Join surrogate pairs into one character, because UTF-16 databases do not distinguish them."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return value


def _plain_float(value: Value) -> Value:
    if isinstance(value, float):
        if value - value != 0.0:
            raise RowRejected("a key column has a number that is not finite")
        return value + 0.0
    return value


def _tag(value: Any) -> dict[str, str]:
    if isinstance(value, Decimal):
        return {"decimal": _canonical_decimal(value)}
    if isinstance(value, datetime):
        return {"datetime": value.isoformat()}
    if isinstance(value, date):
        return {"date": value.isoformat()}
    if isinstance(value, time):
        return {"time": value.isoformat()}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": bytes(value).hex()}
    raise RowRejected(f"a key column has a {type(value).__name__}, which cannot identify a row")


def _canonical_decimal(value: Decimal) -> str:
    """Return an exact form, the same for equal numbers, plain if short (normalize() rounds to 28 digits)."""
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise RowRejected("a key column has a number that is not finite")
    while len(digits) > 1 and digits[-1] == 0:
        digits, exponent = digits[:-1], exponent + 1
    if digits == (0,):
        return "0"
    shortest = Decimal((sign, digits, exponent))
    return format(shortest, "f") if abs(exponent) <= 40 else str(shortest)


_UNTAG: Mapping[str, Callable[[str], Value]] = {
    "decimal": Decimal,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "bytes": bytes.fromhex,
    "digest": str,
}


def _untag(tagged: dict[str, str]) -> Value:
    if len(tagged) == 1:
        ((tag, text),) = tagged.items()
        if tag in _UNTAG:
            return _UNTAG[tag](text)
    raise ValueError(f"invalid value in a document id: {', '.join(sorted(tagged))}")


def _units(text: str) -> int:
    return len(text) + sum(char > "\uffff" for char in text)


# ---------------------------------------------------------------------------------------------------------- digests


def _hash(data: bytes, size: int = _DIGEST) -> bytes:
    return blake2b(data, digest_size=size).digest()


def _safe_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def content_hash(document: Document, number: int, total: int) -> bytes:
    """Return 24 bytes for chunk `number` of `total`; stores append `vector_digest` to make 32.

    Three digests of 8 bytes: text, chunking, model and total (which reveals a missing last chunk); metadata; the row as
    read, equal for all chunks. Only digests of one document are compared, so 8 bytes suffice.
    """
    of_text = _hash(document.text_digest + struct.pack("<II", number, total), 8)
    of_meta = _hash(document.meta_digest + struct.pack("<I", number), 8)
    return of_text + of_meta + _folded(document.row_digest, total)


_GOLDEN = 0x9E3779B97F4A7C15


def _folded(row_digest: bytes, total: int) -> bytes:
    return (int.from_bytes(row_digest, "little") ^ fold(total)).to_bytes(8, "little")


def fold(total: int) -> int:
    """Return the 64 bits by which the number of chunks changes a stored row digest; 0 for a single chunk."""
    return ((total - 1) * _GOLDEN) & 0xFFFFFFFFFFFFFFFF


def vector_digest(vector: NDArray[np.float32]) -> bytes:
    """Return 8 bytes of the vector's float32 values, equal on every machine."""
    return _hash(np.ascontiguousarray(vector, dtype="<f4").tobytes(), 8)


def metadata_json(metadata: Mapping[str, Any]) -> str:
    """Return compact JSON with sorted names. Never raises, because other programs may have changed stored metadata."""
    try:
        return orjson.dumps(metadata, option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONEncodeError, TypeError):
        return json.dumps(metadata, sort_keys=True, separators=(",", ":"), default=repr)


def metadata_digest(metadata: Mapping[str, Any]) -> bytes:
    """Return 16 bytes. Raises RowRejected above LARGEST_METADATA."""
    data = metadata_json(metadata).encode()
    if len(data) > LARGEST_METADATA:
        raise RowRejected(f"the metadata is {len(data)} bytes as JSON, at most {LARGEST_METADATA} are stored")
    return _hash(data)


def chunks(document: Document, pieces: Sequence[str]) -> list[Chunk]:
    """Return the chunks of a document that was cut into `pieces`."""
    total = len(pieces)
    return [
        Chunk(document.id, number, piece, document.metadata, content_hash(document, number, total))
        for number, piece in enumerate(pieces)
    ]


# --------------------------------------------------------------------------------------------------- metadata names

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def metadata_names(columns: Iterable[str]) -> dict[str, str]:
    """Return the metadata name of each column. Names that are JSON-path words are kept. In others every special
    character becomes `_` (/BIC/AZD -> BIC_AZD), and a name already used gets _2, _3 ..."""
    distinct = list(dict.fromkeys(columns))
    names = {column: column for column in distinct if _WORD.fullmatch(column)}
    taken = set(names)
    for column in distinct:
        if column not in names:
            names[column] = _free(_as_word(column), taken)
            taken.add(names[column])
    return {column: names[column] for column in distinct}


def _as_word(column: str) -> str:
    word = re.sub(r"[^A-Za-z0-9_]", "_", column).strip("_") or "COLUMN"
    return f"_{word}" if word[0].isdigit() else word


def _free(word: str, taken: set[str]) -> str:
    number, name = 2, word
    while name in taken:
        name, number = f"{word}_{number}", number + 1
    return name


# ---------------------------------------------------------------------------------------------------------- renderer


class Renderer:
    """Turn rows of one collection into documents and chunks. Thread-safe. The constructor checks the configuration
    against the table: ConfigurationError, UnknownColumn or NoKey, with the setting's name."""

    def __init__(self, spec: CollectionSpec, table: Table, embedder: Embedder) -> None:
        self.key = resolve_key(spec, table)
        self.template = Template.parse(spec.template)
        check_columns(table, self.template.columns, "template")
        check_columns(table, spec.metadata, "metadata")
        _check_types(table, self.template.columns, spec.metadata)
        self.metadata_names = metadata_names(spec.metadata)
        self._chunker = Chunker(spec.chunk, embedder)
        self.max_tokens, self.overlap = self._chunker.max_tokens, self._chunker.overlap
        columns = tuple(dict.fromkeys((*self.template.columns, *self.metadata_names)))
        self.query = Query(table.ref, self.key, columns, spec.where)
        self._slots = [(name, values.formatter(_column(table, name))) for name in self.template.slots]
        self._amounts = _amounts(self.template, table)
        self._metadata = [
            (column, name, values.scalar(_column(table, column))) for column, name in self.metadata_names.items()
        ]
        # Covers everything except the row that affects rendering.
        self.digest = _hash(self._chunker.digest + _safe_bytes(_shape(spec, table, self)))
        self._serialize = _serializer(table, dict.fromkeys((*self.key, *self.query.columns)))

    def row_digest(self, row: Row) -> bytes:
        """Return 8 bytes of the row and everything else that affects rendering: equal digests mean equal documents.
        Costs a tenth of rendering."""
        return blake2b(self.digest + self._content(row), digest_size=8).digest()

    def row_digests(self, rows: Iterable[Row]) -> list[bytes]:
        """Return the `row_digest` of each row."""
        prefix, content = self.digest, self._content
        return [blake2b(prefix + content(row), digest_size=8).digest() for row in rows]

    def _content(self, row: Row) -> bytes:
        if row.token is not None:
            return b"\0" + row.token
        values = row.values
        return self._serialize(values.in_order if isinstance(values, Cells) else tuple(values.values()))

    def document(self, row: Row) -> Document:
        """Render a row. Raises RowRejected, naming the column, for an invalid value or a key too long for an id."""
        text = self._text(row.values)
        metadata = self._scalars(row.values)
        text_digest, meta_digest = self._chunker.text_digest(text), metadata_digest(metadata)
        return Document(document_id(row.key), text, metadata, text_digest, meta_digest, self.row_digest(row))

    def chunks(self, document: Document) -> list[Chunk]:
        return self.chunks_of([document])[0]

    def chunks_of(self, documents: Sequence[Document]) -> list[list[Chunk]]:
        """Return the chunks of each document, [] for an empty one."""
        pieces = self._chunker.pieces_of([document.text for document in documents])
        return [chunks(document, some) for document, some in zip(documents, pieces, strict=True)]

    def _text(self, row: Mapping[str, Value]) -> str:
        try:
            shown = [show(row[name]) for name, show in self._slots]
            for position, currency_column in self._amounts:
                name = self.template.slots[position]
                shown[position] = values.amount(row[name], shown[position + 1], currency_column)
                if not shown[position]:
                    shown[position + 1] = ""
        except (ValueError, ArithmeticError) as error:
            raise self._rejected(row, self._slots, error) from None
        return self.template.render(shown)

    def _scalars(self, row: Mapping[str, Value]) -> dict[str, Scalar]:
        try:
            return {name: convert(row[column]) for column, name, convert in self._metadata}
        except (ValueError, ArithmeticError) as error:
            raise self._rejected(row, [(column, convert) for column, _, convert in self._metadata], error) from None

    def _rejected(
        self, row: Mapping[str, Value], converters: Sequence[tuple[str, Callable[[Any], Any]]], error: Exception
    ) -> RowRejected:
        """Find the failing column by trying each alone. The message must not contain the value."""
        for column, convert in converters:
            try:
                convert(row[column])
            except (ValueError, ArithmeticError):
                return RowRejected(f"column {column!r} has a value that cannot be rendered ({type(error).__name__})")
        return RowRejected(f"an amount cannot be rendered ({type(error).__name__})")


def _shape(spec: CollectionSpec, table: Table, renderer: Renderer) -> str:
    """Return everything except the row that affects rendering, including what `values` derives from the columns."""
    query = renderer.query
    used = [_column(table, name) for name in dict.fromkeys((*query.key, *query.columns))]
    columns = [(one.name, one.type_name, one.length, one.scale, one.comment) for one in used]
    return repr((spec.template, query.key, columns, renderer.metadata_names, RENDERING))


def _serializer(table: Table, names: Iterable[str]) -> Callable[[tuple[Value, ...]], bytes]:
    """Return a function from a row's values to bytes, unique per row. JSON is four times as fast as `repr` but cannot
    represent NaN and some texts; these use `repr`, which never starts with `[`."""
    floats = any(_column(table, name).type_name in _FLOATS for name in names)
    return _as_repr if floats else _as_json


def _as_repr(values: tuple[Value, ...]) -> bytes:
    return _safe_bytes(repr(values))


def _as_json(values: tuple[Value, ...]) -> bytes:
    try:
        return orjson.dumps(values, default=_as_tagged, option=orjson.OPT_PASSTHROUGH_DATETIME)
    except orjson.JSONEncodeError:
        return _as_repr(values)


def _as_tagged(value: Any) -> list[str]:
    """Return a value without a JSON type as an array, which no other value uses."""
    return [type(value).__name__, str(value) if isinstance(value, Decimal) else repr(value)]


def _column(table: Table, name: str) -> Column:
    column = table.column(name)
    assert column is not None  # check_columns raises otherwise
    return column


def _check_types(table: Table, in_template: Iterable[str], in_metadata: Iterable[str]) -> None:
    for setting, names in (("template", in_template), ("metadata", in_metadata)):
        for name in names:
            if (kind := _column(table, name).type_name) in UNREADABLE:
                raise ConfigurationError(
                    f"`{setting}`: column {name!r} of {table.ref} is a {kind}, which cannot be used there"
                )


def _amounts(template: Template, table: Table) -> list[tuple[int, Column]]:
    """Return the slots with an amount directly followed by its currency: position and the currency's column."""
    pairs: list[tuple[int, Column]] = []
    for position, (name, following) in enumerate(zip(template.slots, template.slots[1:], strict=False)):
        currency = _column(table, following)
        blank = not template.literals[position + 1].strip()
        if blank and values.is_amount(_column(table, name)) and values.is_currency(currency):
            pairs.append((position, currency))
    return pairs

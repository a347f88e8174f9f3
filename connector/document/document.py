"""Turn a row into a document and its chunks: rendered text, metadata, identity, digests."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal
from hashlib import blake2b, sha256
from itertools import pairwise, starmap
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from connector.document import values
from connector.document.template import Template
from connector.errors import ConfigurationError, RowRejected
from connector.hana.catalog import VECTOR_TYPES, check_columns, resolve_key
from connector.model import (
    Cells,
    Chunk,
    ChunkSpec,
    CollectionSpec,
    Document,
    Key,
    Page,
    Query,
    Row,
    Table,
    Value,
    keys_of,
)
from connector.protocols import Embedder

LONGEST_ID = 2000  # SRC_KEY is NVARCHAR(2000), which counts UTF-16 units
LARGEST_METADATA = 100_000  # bytes of one row's metadata as JSON
UNREADABLE = VECTOR_TYPES | {"BLOB", "ST_GEOMETRY", "ST_POINT", "ARRAY"}
_DIGEST = 16
UNKNOWN_VECTOR = bytes(8)  # in place of a `vector_digest`, for a vector that the database has computed
_PAIR, _NUMBER = struct.Struct("<II"), struct.Struct("<I")
RENDERING = 3  # increase when this code renders the same row differently
Plain = bool | int | float | str | None  # a key value as JSON


def document_id(key: Key) -> str:
    """Return the key as a canonical, compact JSON array, unique per key.

    Text, integers, booleans and NULL are plain JSON; floats have a point or exponent; other types are objects:
    {"decimal":"12.5"} {"date":..} {"time":..} {"datetime":..} {"bytes":"<hex>"}. Keys that SQL considers equal (1.50
    and 1.5, 0.0 and -0.0) have the same id. Raises RowRejected above 2000 characters, the length of SRC_KEY.
    """
    for value in key:
        if value.__class__ is float:
            if not all(math.isfinite(value) for value in key if isinstance(value, float)):
                raise RowRejected("a key column has a number that is not finite")
            key = tuple(value + 0.0 if isinstance(value, float) else value for value in key)  # -0.0 becomes 0.0
            break
    try:
        text = orjson.dumps(key, default=_tag, option=orjson.OPT_PASSTHROUGH_DATETIME).decode()
    except orjson.JSONEncodeError as error:
        if isinstance(error.__cause__, RowRejected):
            raise error.__cause__ from None
        # orjson rejects integers beyond 64 bits and surrogates. A surrogate pair becomes one character, because UTF-16
        # databases do not distinguish the two; an unpaired surrogate is escaped.
        whole = [
            value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
            if isinstance(value, str)
            else value
            for value in key
        ]
        text = json.dumps(whole, default=_tag, ensure_ascii=False, separators=(",", ":"))
        text = re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match.group()):04x}", text)
    if len(text) > LONGEST_ID // 2 and (units := len(text) + sum(char > "\uffff" for char in text)) > LONGEST_ID:
        raise RowRejected(f"the key is {units} characters long as an id, at most {LONGEST_ID} fit SRC_KEY")
    return text


def document_ids(keys: Sequence[Key]) -> list[str]:
    """Return the `document_id` of each key, for a page at once if possible. Raises RowRejected as `document_id`."""
    if not any(float in set(map(type, column)) for column in zip(*keys, strict=True)):
        with suppress(orjson.JSONEncodeError):
            arrays = (
                orjson.dumps(keys, default=_tag, option=orjson.OPT_PASSTHROUGH_DATETIME).decode()[2:-2].split("],[")
            )
            # As many parts as keys: no text contains the separator. A part this short fits SRC_KEY.
            if len(arrays) == len(keys) and max(map(len, arrays)) <= LONGEST_ID // 2 - 2:
                return [f"[{array}]" for array in arrays]
    return [document_id(key) for key in keys]


def quarantine_id(key: Key) -> str:
    """Return `document_id`, or a digest if it rejects the key, so that the row can be quarantined."""
    try:
        return document_id(key)
    except RowRejected:
        return orjson.dumps([{"digest": _hash(_safe_bytes(repr(key))).hex()}]).decode()


def parse_id(id: str) -> list[Value]:
    """Return the key values of a document id, with their types. Raises ValueError for anything else."""

    def untag(tagged: dict[str, str]) -> Value:
        tag = next(iter(tagged), "")
        if len(tagged) == 1 and tag in _TAGS:
            return _TAGS[tag](tagged[tag])
        raise ValueError(f"invalid value in a document id: {', '.join(sorted(tagged))}")

    parsed = json.loads(id, object_hook=untag)
    if not isinstance(parsed, list):
        raise ValueError(f"a document id is a JSON array, not {type(parsed).__name__}")
    return parsed


def named_key(values: Sequence[Value], columns: Sequence[str]) -> dict[str, Plain]:
    """Return key values by column name, or by position if the names are unknown. Types without a JSON form become
    text."""
    names = columns if len(columns) == len(values) else map(str, range(len(values)))
    plain = (value.hex() if isinstance(value, bytes) else value for value in values)
    return {name: value if isinstance(value, Plain) else str(value) for name, value in zip(names, plain, strict=True)}


_TAGS: Mapping[str, Callable[[str], Value]] = {
    "decimal": Decimal,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "bytes": bytes.fromhex,
    "digest": str,
}


def _tag(value: Any) -> dict[str, str]:
    if isinstance(value, datetime):
        return {"datetime": value.isoformat()}
    if isinstance(value, date):
        return {"date": value.isoformat()}
    if isinstance(value, time):
        return {"time": value.isoformat()}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": bytes(value).hex()}
    if not isinstance(value, Decimal):
        raise RowRejected(f"a key column has a {type(value).__name__}, which cannot identify a row")
    # Exact, identical for equal numbers, and without an exponent if short; normalize() would round to 28 digits.
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise RowRejected("a key column has a number that is not finite")
    while len(digits) > 1 and digits[-1] == 0:
        digits, exponent = digits[:-1], exponent + 1
    if digits == (0,):
        return {"decimal": "0"}
    shortest = Decimal((sign, digits, exponent))
    return {"decimal": format(shortest, "f") if abs(exponent) <= 40 else str(shortest)}


def _hash(data: bytes, size: int = _DIGEST) -> bytes:
    return blake2b(data, digest_size=size).digest()


def _safe_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def content_hash(document: Document, number: int, total: int) -> bytes:
    """Return 24 bytes for chunk `number` of `total`; stores append `vector_digest` to make 32.

    Three digests of 8 bytes each: text, chunking, model and total (which reveals a missing last chunk); metadata; the
    row as read, equal for all chunks. Only digests of one document are compared, so 8 bytes suffice. SQL computes the
    first two of a single chunk if the database has the model.
    """
    if total == 1 and document.in_database:
        return document.text_digest[:8] + document.meta_digest[:8] + document.row_digest
    of_text = blake2b(document.text_digest + _PAIR.pack(number, total), digest_size=8).digest()
    of_meta = blake2b(document.meta_digest + _NUMBER.pack(number), digest_size=8).digest()
    if total == 1:
        return of_text + of_meta + document.row_digest
    of_row = (int.from_bytes(document.row_digest, "little") ^ fold(total)).to_bytes(8, "little")
    return of_text + of_meta + of_row


def fold(total: int) -> int:
    """Return the 64-bit number to XOR into a row digest for the number of chunks; 0 for a single chunk."""
    return ((total - 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF


def vector_digest(vector: NDArray[np.float32]) -> bytes:
    """Return an 8-byte digest of the vector's float32 values, equal on every machine."""
    return vector_digests(vector[None])[0]


def vector_digests(vectors: NDArray[np.float32]) -> list[bytes]:
    """Return the `vector_digest` of each row."""
    data, size = np.ascontiguousarray(vectors, dtype="<f4").tobytes(), 4 * vectors.shape[1]
    view = memoryview(data)
    return [blake2b(view[start : start + size], digest_size=8).digest() for start in range(0, len(data), size)]


def metadata_json(metadata: Mapping[str, Any]) -> str:
    """Return compact JSON with sorted names. Never raises, because other programs may have changed stored metadata."""
    try:
        return orjson.dumps(metadata, option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONEncodeError, TypeError):
        return json.dumps(metadata, sort_keys=True, separators=(",", ":"), default=repr)


def metadata_digest(metadata: Mapping[str, Any], in_database: bool = False) -> bytes:
    """Return a 16-byte digest. Raises RowRejected above LARGEST_METADATA. `in_database`: as in Document."""
    data = metadata_json(metadata).encode()
    if len(data) > LARGEST_METADATA:
        raise RowRejected(f"the metadata is {len(data)} bytes as JSON, at most {LARGEST_METADATA} are stored")
    return sha256(data).digest()[:_DIGEST] if in_database else _hash(data)


def chunks(document: Document, pieces: Sequence[str]) -> list[Chunk]:
    """Return the chunks of a document that was cut into `pieces`."""
    total = len(pieces)
    return [
        Chunk(document.id, number, piece, document.metadata, content_hash(document, number, total))
        for number, piece in enumerate(pieces)
    ]


def metadata_names(columns: Iterable[str]) -> dict[str, str]:
    """Return the metadata name of each column. Names that are JSON-path words are kept. In others every special
    character becomes `_` (/BIC/AZD -> BIC_AZD), and a name already used gets _2, _3 ..."""
    distinct = list(dict.fromkeys(columns))
    names = {column: column for column in distinct if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", column)}
    taken = set(names)
    for column in distinct:
        if column in names:
            continue
        word = re.sub(r"[^A-Za-z0-9_]", "_", column).strip("_") or "COLUMN"
        word = f"_{word}" if word[0].isdigit() else word
        number, name = 2, word
        while name in taken:
            name, number = f"{word}_{number}", number + 1
        names[column] = name
        taken.add(name)
    return {column: names[column] for column in distinct}


class Chunker:
    """Cut texts. Thread-safe. Raises ConfigurationError for a size that the model does not support."""

    def __init__(self, spec: ChunkSpec, embedder: Embedder) -> None:
        most = embedder.max_tokens
        self.max_tokens = spec.max_tokens or most
        if self.max_tokens > most:
            raise ConfigurationError(
                f"`chunk.max_tokens` is {self.max_tokens}, but {embedder.model} takes at most {most}: texts would be "
                "cut off"
            )
        if spec.overlap < 0:
            raise ConfigurationError(f"`chunk.overlap` is {spec.overlap}; it must be at least 0")
        # With few tokens the default overlap would repeat more than half of each piece.
        self.overlap = min(spec.overlap, self.max_tokens // 2)
        self._embedder = embedder
        self.in_database = embedder.database_model is not None
        self._hash = blake2b(digest_size=_DIGEST)
        sizes = f"{self.max_tokens} {self.overlap}".encode()
        for part in (sizes, embedder.fingerprint.encode("utf-8", "surrogatepass")):
            self._hash.update(struct.pack("<Q", len(part)) + part)
        self.digest = self._hash.digest()  # a 16-byte digest of sizes and model

    def text_digest(self, text: str) -> bytes:
        """Return a 16-byte digest of the text, the sizes and the model."""
        if self.in_database:
            return sha256(self.digest + text.encode()).digest()[:_DIGEST]
        digest = self._hash.copy()
        digest.update(text.encode())
        return digest.digest()

    def pieces_of(self, texts: Sequence[str]) -> list[list[str]]:
        """Return the pieces of each text, [] for an empty one. Counts tokens only of texts that may be too long: a
        tokeniser gives at most one token per ASCII character and one at the start; others may become several."""
        most = self.max_tokens
        long = [
            position
            for position, text in enumerate(texts)
            if len(text) >= most or (not text.isascii() and len(text) + 9 * (len(text.encode()) - len(text)) >= most)
        ]
        counts = self._embedder.count_tokens([texts[position] for position in long]) if long else []
        pieces = [[text] if text else [] for text in texts]
        for position, count in zip(long, counts, strict=True):
            if count > most:
                pieces[position] = self._embedder.split(texts[position], most, self.overlap)
        return pieces


def _cells(row: Row) -> tuple[Value, ...]:
    return row.values.in_order if isinstance(row.values, Cells) else tuple(row.values.values())


def _cells_of(rows: Sequence[Row]) -> Iterable[tuple[Value, ...]]:
    """Return the cells of each row in the order of the first row's columns."""
    if isinstance(rows, Page):
        return rows.cells
    names, each = tuple(rows[0].values), (row.values for row in rows)
    return [row.in_order if isinstance(row, Cells) else tuple([row[name] for name in names]) for row in each]


def _as_tagged(value: Any) -> list[str]:
    """Return an array for a value without a JSON type; no other value becomes an array."""
    return [type(value).__name__, str(value) if isinstance(value, Decimal) else repr(value)]


class Renderer:
    """Turn rows of one collection into documents and chunks. Thread-safe. The constructor checks the configuration
    against the table and raises ConfigurationError, UnknownColumn or NoKey with the setting's name."""

    def __init__(self, spec: CollectionSpec, table: Table, embedder: Embedder) -> None:
        self.key = resolve_key(spec, table)
        self.template = Template.parse(spec.template)
        columns = {column.name: column for column in table.columns}
        for setting, names in (("template", self.template.columns), ("metadata", spec.metadata)):
            check_columns(table, names, setting)
            for name in names:
                if (kind := columns[name].type_name) in UNREADABLE:
                    raise ConfigurationError(
                        f"`{setting}`: column {name!r} of {table.ref} is a {kind}, which cannot be used there"
                    )
        self.metadata_names = metadata_names(spec.metadata)
        self.chunker = Chunker(spec.chunk, embedder)
        read = tuple(dict.fromkeys((*self.template.columns, *self.metadata_names)))
        self.query = Query(table.ref, self.key, read, spec.where)
        slots, literals = self.template.slots, self.template.literals
        self._slots = [(name, values.formatter(columns[name])) for name in slots]
        # Amounts that are directly followed by their currency: the position, and the currency's column.
        self.amounts = [
            (position, columns[following])
            for position, (name, following) in enumerate(pairwise(slots))
            if not literals[position + 1].strip()
            and values.is_amount(columns[name])
            and values.is_currency(columns[following])
        ]
        self._metadata = [
            (column, name, values.scalar(columns[column])) for column, name in self.metadata_names.items()
        ]
        used = [columns[name] for name in dict.fromkeys((*self.key, *read))]
        shape = [(one.name, one.type_name, one.length, one.scale, one.comment) for one in used]
        # Covers all that affects rendering except the row itself, including what `values` derives from the columns.
        settings = repr((spec.template, self.key, shape, self.metadata_names, RENDERING))
        self.digest = _hash(self.chunker.digest + _safe_bytes(settings))
        self._floats = any(one.type_name in ("DOUBLE", "REAL", "FLOAT") for one in used)

    def row_digest(self, row: Row) -> bytes:
        """Return an 8-byte digest of the row and all else that affects rendering: equal digests mean equal documents.
        Costs a tenth of rendering."""
        return blake2b(self.digest + self._content(row), digest_size=8).digest()

    def row_digests(self, rows: Sequence[Row]) -> list[bytes]:
        """Return the `row_digest` of each row."""
        prefix = self.digest
        contents = map(self._content_of, rows.cells) if isinstance(rows, Page) else map(self._content, rows)
        return [blake2b(prefix + content, digest_size=8).digest() for content in contents]

    def _content(self, row: Row) -> bytes:
        return self._content_of(_cells(row)) if row.token is None else b"\0" + row.token

    def _content_of(self, cells: tuple[Value, ...]) -> bytes:
        """Return bytes that differ for different content. JSON is four times as fast as `repr` but cannot represent NaN
        and some texts; these use `repr`, which never starts with `[`."""
        if not self._floats:
            try:
                return orjson.dumps(cells, default=_as_tagged, option=orjson.OPT_PASSTHROUGH_DATETIME)
            except orjson.JSONEncodeError:
                pass
        return _safe_bytes(repr(cells))

    def document(self, row: Row) -> Document:
        """Render a row. Raises RowRejected, naming the column, for an invalid value or a key too long for an id."""
        return self._documents([row], map(document_id, [row.key]))[0]

    def documents(self, rows: Sequence[Row], ids: Iterable[str] | None = None) -> list[Document | RowRejected]:
        """Render rows of one query: `document` of each, or its error. Works a column at a time. `ids`: of the rows, if
        known."""
        if ids is None:
            ids = map(document_id, keys_of(rows))
        try:
            return list[Document | RowRejected](self._documents(rows, ids)) if rows else []
        except RowRejected:  # some row is invalid: find out which
            return [self._document_or_error(row) for row in rows]

    def _documents(self, rows: Sequence[Row], ids: Iterable[str]) -> list[Document]:
        """Render at least one row. Raises RowRejected, which names the column if there is only one row."""
        columns = dict(zip(rows[0].values, zip(*_cells_of(rows), strict=True), strict=True))
        try:
            shown = [values.convert_all(show, columns[name]) for name, show in self._slots]
            for position, currency_column in self.amounts:
                amounts = zip(columns[self.template.slots[position]], shown[position + 1], strict=True)
                shown[position] = [values.amount(value, currency, currency_column) for value, currency in amounts]
                kept = zip(shown[position], shown[position + 1], strict=True)
                shown[position + 1] = [currency if amount else "" for amount, currency in kept]
            scalars = [values.convert_all(convert, columns[column]) for column, _, convert in self._metadata]
        except (ValueError, ArithmeticError) as error:
            raise self._rejected(rows[0].values, error) from None
        texts = self.template.render_all(shown)
        names = [name for _, name, _ in self._metadata]
        metadata = [dict(zip(names, some, strict=True)) for some in zip(*scalars, strict=True)] or [{} for _ in rows]
        # Of several errors the first counts: of a value, of the metadata, of the key.
        shared = [self.chunker.in_database] * len(texts)
        digests = list(map(self.chunker.text_digest, texts)), list(map(metadata_digest, metadata, shared))
        parts = zip(ids, texts, metadata, *digests, self.row_digests(rows), shared, strict=True)
        return list(starmap(Document, parts))

    def _document_or_error(self, row: Row) -> Document | RowRejected:
        try:
            return self.document(row)
        except RowRejected as error:
            return error

    def chunks_of(self, documents: Sequence[Document]) -> list[list[Chunk]]:
        """Return the chunks of each document, [] for an empty one."""
        pieces = self.chunker.pieces_of([document.text for document in documents])
        return [chunks(document, some) for document, some in zip(documents, pieces, strict=True)]

    def _rejected(self, row: Mapping[str, Value], error: Exception) -> RowRejected:
        """Find the failing column by trying each alone. The message must not contain the value."""
        for column, convert in (*self._slots, *((column, convert) for column, _, convert in self._metadata)):
            try:
                convert(row[column])
            except (ValueError, ArithmeticError):
                return RowRejected(f"column {column!r} has a value that cannot be rendered ({type(error).__name__})")
        return RowRejected(f"an amount cannot be rendered ({type(error).__name__})")

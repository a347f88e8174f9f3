"""HANA's vectors: fvecs bytes (little-endian u32 dimension, then float32 or float16), text form and functions.

Error 8 (invalid argument) for invalid vectors is this emulator's choice; HANA's code is unknown.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hana_emulator.errors import HanaError

MAX_DIMENSION = 65_000
Floats = NDArray[np.float32]


def bad_vector(detail: str) -> HanaError:
    return HanaError(8, f"invalid argument: {detail}")


def different_dimensions(left: int, right: int) -> HanaError:
    return bad_vector(f"vectors have different dimensions: {left} and {right}")


@lru_cache(maxsize=64)
def decode(data: bytes) -> Floats:
    """Read-only float32 values of fvecs bytes of either width. Raises HanaError 8 for other bytes."""
    count = int.from_bytes(data[:4], "little")
    if count and len(data) == 4 + 4 * count:
        return np.frombuffer(data, "<f4", count, 4).astype(np.float32, copy=False)
    if count and len(data) == 4 + 2 * count:
        return np.frombuffer(data, "<f2", count, 4).astype(np.float32)
    raise bad_vector("not the binary form of a vector (little-endian dimension, then that many floats)")


def encode(values: Any, kind: str = "<f4") -> bytes:
    """Convert to fvecs bytes; `kind` is the NumPy element type: '<f4' (REAL_VECTOR) or '<f2' (HALF_VECTOR)."""
    with np.errstate(over="ignore"):
        array = np.asarray(values, dtype=kind)
    if not 1 <= array.size <= MAX_DIMENSION:
        raise bad_vector(f"a vector has 1 to {MAX_DIMENSION} elements, not {array.size}")
    if not np.isfinite(array).all():
        raise bad_vector("a vector's elements must be finite and fit its element type")
    return array.size.to_bytes(4, "little") + array.tobytes()


def to_real_vector(value: Any) -> bytes:
    """Convert text '[1,2.5]', fvecs bytes of either width, or fvecs bytes decoded as text."""
    return encode(_floats(value))


def to_half_vector(value: Any) -> bytes:
    return encode(_floats(value), "<f2")


def _floats(value: Any) -> Any:
    if isinstance(value, bytes):
        return decode(value)
    if not isinstance(value, str):
        raise bad_vector("a vector is made of text like '[1,2.5]' or of its binary form")
    text = value.strip(" \t\r\n")
    return _parse(text) if text.startswith("[") else decode(value.encode("utf-8", "surrogatepass"))


def _parse(text: str) -> list[float]:
    try:
        found = json.loads(text)
    except ValueError:
        raise bad_vector("text of a vector must look like '[1,2.5]'") from None
    if not all(type(item) in (int, float) for item in found):
        raise bad_vector("text of a vector must hold numbers only")
    return [float(item) for item in found]


def to_text(value: Any) -> str:
    """Text such as '[1,2.5]', with the fewest digits that read back as the same float."""
    values = decode(value)
    half = len(value) == 4 + 2 * values.size
    elements = values.astype(np.float16) if half else values
    texts = [
        str(int(number)) if number.is_integer() and abs(number) < 1e15 else str(element)
        for element, number in zip(elements, values.tolist(), strict=True)
    ]
    return f"[{','.join(texts)}]"


def cardinality(value: Any) -> int:
    return int(decode(value).size)


def _pair(left: Any, right: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    a, b = decode(left), decode(right)
    if a.size != b.size:
        raise different_dimensions(a.size, b.size)
    return a.astype(np.float64), b.astype(np.float64)


def cosine_similarity(left: Any, right: Any) -> float:
    """In [-1, 1]; 0 if either vector is all zeros (HANA's result is unknown)."""
    a, b = _pair(left, right)
    norms = math.sqrt(float(a @ a)) * math.sqrt(float(b @ b))
    return _single(max(-1.0, min(1.0, float(a @ b) / norms))) if norms else 0.0


def l2_distance(left: Any, right: Any) -> float:
    a, b = _pair(left, right)
    return _single(float(np.linalg.norm(a - b)))


def _single(score: float) -> float:
    """Round to single precision, like column search and as sqlalchemy-hana's tests expect."""
    return float(np.float32(score)) if abs(score) <= float(np.finfo(np.float32).max) else score


def l2_norm(value: Any) -> float:
    return float(np.linalg.norm(decode(value).astype(np.float64)))


def l2_normalize(value: Any) -> bytes:
    """Scale to length 1; a zero vector is unchanged. Keeps the element type."""
    norm = l2_norm(value)
    kind = "<f2" if len(value) == 4 + 2 * cardinality(value) else "<f4"
    return encode(decode(value) / norm, kind) if norm else bytes(value)

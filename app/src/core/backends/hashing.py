"""`hash:384`: vectors from hashed words and letter trigrams, for tests and for trying the product without a model.

Deterministic on every machine, needs neither torch nor a tokenizer. Texts that share words or word stems are near;
meaning is beyond it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..device import DeviceProfile
from ..memory import ModelShape
from . import ModelInfo, ModelNotFound, TokenIds, Vectors

PREFIX = "hash:"
_TOKEN = re.compile(r"\w{1,24}|[^\w\s]")
_LEAST, _MOST = 8, 4096
_MAX_TOKENS = 254
_PLACES = 4
"""Coordinates that each feature touches; more makes strangers less similar, fewer is cheaper."""
_WORD_WEIGHT, _TRIGRAM_WEIGHT = 1.0, 0.4
_VERSION = "1"


class HashingBackend:
    """Backend of the models `hash:<dimension>`. A token's id is its own UTF-8 as a number, so no vocabulary is kept."""

    def __init__(self, model: str) -> None:
        self.profile = DeviceProfile.cpu()
        dimension = parse_dimension(model)
        digest = hashlib.sha256(f"{model}/{_VERSION}".encode()).hexdigest()
        self.info = ModelInfo(
            name=model,
            dimension=dimension,
            max_tokens=_MAX_TOKENS,
            special_tokens=0,
            pooling="sum",
            weights_sha256=digest,
            tokenizer_sha256=digest,
            precision="fp32",
            precision_reason="hashing has only one",
            shape=ModelShape(dimension, dimension, 1, _MAX_TOKENS),
            path="hashing",
        )

    def tokenize(self, texts: Sequence[str]) -> list[TokenIds]:
        return [[_to_id(word) for word in _TOKEN.findall(text.lower())[:_MAX_TOKENS]] for text in texts]

    def count(self, texts: Sequence[str]) -> list[int]:
        return [sum(1 for _ in _TOKEN.finditer(text)) for text in texts]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        return [match.span() for match in _TOKEN.finditer(text)]

    def forward(self, batch: Sequence[TokenIds], *, exact: bool = False) -> Vectors:
        vectors = [_text_vector(tuple(ids), self.info.dimension) for ids in batch]
        return np.array(vectors, dtype=np.float32).reshape(len(batch), self.info.dimension)

    def free_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


def parse_dimension(model: str) -> int:
    """384 of `hash:384`. Raises ModelNotFound."""
    number = model.removeprefix(PREFIX)
    if not number.isdecimal() or not _LEAST <= int(number) <= _MOST:
        raise ModelNotFound(f"model {model!r}: a hashing model is hash:N with N from {_LEAST} to {_MOST}")
    return int(number)


def _to_id(word: str) -> int:
    return int.from_bytes(word.encode("utf-8", "surrogatepass"))


def _to_word(token: int) -> str:
    return token.to_bytes((token.bit_length() + 7) // 8).decode("utf-8", "surrogatepass")


def _text_vector(ids: tuple[int, ...], dimension: int) -> NDArray[np.float64]:
    features = [_word_features(token, dimension) for token in ids] or [_features(("",), (1.0,), dimension)]
    places = np.concatenate([where for where, _ in features])
    weights = np.concatenate([weight for _, weight in features])
    vector: NDArray[np.float64] = np.bincount(places, weights=weights, minlength=dimension).astype(np.float64)
    if not vector.any():  # every feature cancelled another: as good as an empty text
        return _text_vector((), dimension)
    return vector


@lru_cache(maxsize=16_384)
def _word_features(token: int, dimension: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The word itself, and its letter trigrams, which it shares with words of the same stem."""
    word = _to_word(token)
    edged = f"<{word}>"
    grams = [edged[start : start + 3] for start in range(len(edged) - 2)]
    share = _TRIGRAM_WEIGHT / max(1, len(grams)) ** 0.5
    return _features((f"={word}", *grams), (_WORD_WEIGHT, *[share] * len(grams)), dimension)


def _features(
    names: Sequence[str], weights: Sequence[float], dimension: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    hashes = [
        hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4 * _PLACES).digest() for name in names
    ]
    drawn = np.frombuffer(b"".join(hashes), dtype="<u4").reshape(len(names), _PLACES)
    signs = np.where(drawn & 1, 1.0, -1.0) * np.asarray(weights)[:, None]
    return (drawn >> 1).astype(np.int64).ravel() % dimension, signs.ravel()

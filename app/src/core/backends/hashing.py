"""`hash:384`: vectors from hashed words and letter trigrams, for tests and for trying the product without a model.

Deterministic on every machine, needs neither torch nor a tokenizer. Texts that share words or word stems are near;
meaning is beyond it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from ..device import DeviceProfile
from ..memory import ModelShape
from . import ModelInfo, ModelNotFound, TokenIds, Vectors

PREFIX = "hash:"
_TOKEN = re.compile(r"\w{1,24}|[^\w\s]")
_GROWING = "\u0130"
"""The one character (Turkish, I with a dot) whose small form is two, the second of them no letter."""
_LEAST, _MOST = 8, 4096
_MAX_TOKENS = 254
_PLACES = 4
"""Coordinates that each feature touches; more makes strangers less similar, fewer is cheaper."""
_WORD_WEIGHT, _TRIGRAM_WEIGHT = 1.0, 0.4
_VERSION = "1"
_BLOCK = 32
"""Texts summed at once: few enough for the processor's cache."""
_REMEMBERED = 16_384
"""Words whose features are kept."""
_Features = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Places and what stands there."""


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
            path_reason="words and trigrams have no other way",
        )
        self._known: dict[int, _Features] = {}
        self._blank = _features([""], [1.0], dimension)

    def tokenize(self, texts: Sequence[str]) -> list[TokenIds]:
        return [[_to_id(word) for word in _TOKEN.findall(text.lower())[:_MAX_TOKENS]] for text in texts]

    def count(self, texts: Sequence[str]) -> list[int]:
        return [len(_TOKEN.findall(text.lower() if _GROWING in text else text)) for text in texts]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        if _GROWING not in text:
            return [match.span() for match in _TOKEN.finditer(text)]
        places = [place for place, char in enumerate(text) for _ in char.lower()]
        spans = (match.span() for match in _TOKEN.finditer(text.lower()))
        return [(places[start], places[end - 1] + 1) for start, end in spans]

    def forward(self, batch: Sequence[TokenIds], *, exact: bool = False) -> Vectors:
        known = self._features_of({token for ids in batch for token in ids})
        vectors = np.empty((len(batch), self.info.dimension), dtype=np.float32)
        for start in range(0, len(batch), _BLOCK):
            texts = [[known[token] for token in ids] or [self._blank] for ids in batch[start : start + _BLOCK]]
            vectors[start : start + len(texts)] = self._sums(texts)
        return vectors

    def _features_of(self, tokens: set[int]) -> dict[int, _Features]:
        """Of each token, remembered for the next batch: the same words come again and again."""
        unknown = [token for token in tokens if token not in self._known]
        if len(self._known) + len(unknown) > _REMEMBERED:
            self._known, unknown = {}, list(tokens)
        self._known |= zip(unknown, _word_features(unknown, self.info.dimension), strict=True)
        return self._known

    def _sums(self, texts: Sequence[Sequence[_Features]]) -> NDArray[np.float64]:
        """A row for each text: at each place the sum of what its features put there, in their order."""
        shape = (len(texts), self.info.dimension)
        wheres, weights = zip(*chain.from_iterable(texts), strict=True)
        starts = np.repeat(np.arange(shape[0]) * shape[1], [len(features) for features in texts])
        places = np.concatenate(wheres)
        places += np.repeat(starts, [len(where) for where in wheres])
        sums = np.bincount(places, weights=np.concatenate(weights), minlength=shape[0] * shape[1]).reshape(shape)
        cancelled = ~sums.any(axis=1)  # every feature cancelled another: as good as an empty text
        if cancelled.any():
            where, weight = self._blank
            sums[cancelled] = np.bincount(where, weights=weight, minlength=shape[1])
        return sums.astype(np.float64, copy=False)

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


def _word_features(tokens: Sequence[int], dimension: int) -> list[_Features]:
    """Of each word: itself, and its letter trigrams, which it shares with words of the same stem."""
    names: list[str] = []
    weights: list[float] = []
    ends = [0]
    for word in map(_to_word, tokens):
        edged = f"<{word}>"
        grams = [edged[start : start + 3] for start in range(len(edged) - 2)]
        names += (f"={word}", *grams)
        weights += (_WORD_WEIGHT, *[_TRIGRAM_WEIGHT / max(1, len(grams)) ** 0.5] * len(grams))
        ends.append(len(names) * _PLACES)
    places, signs = _features(names, weights, dimension)
    return [(places[start:end], signs[start:end]) for start, end in pairwise(ends)]


def _features(names: Sequence[str], weights: Sequence[float], dimension: int) -> _Features:
    drawn = np.frombuffer(b"".join(map(_digest, names)), dtype="<u4").reshape(len(names), _PLACES)
    signs = np.where(drawn & 1, 1.0, -1.0) * np.asarray(weights)[:, None]
    return (drawn >> 1).astype(np.int64).ravel() % dimension, signs.ravel()


@lru_cache(maxsize=32_768)
def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4 * _PLACES).digest()

"""`hash:384`: deterministic vectors from hashed words and letter trigrams, for tests and trials without a model.

Texts that share words or word stems get similar vectors; synonyms do not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..device import DeviceProfile
from ..memory import ModelShape
from . import Backend, ModelInfo, ModelNotFound, Pause, TokenBatch, Vectors

PREFIX = "hash:"
_TOKEN = re.compile(r"\w{1,24}|[^\w\s]")
_LEAST, _MOST = 8, 4096
_MAX_TOKENS = 254
_PLACES = 4  # coordinates of each feature: more make unrelated texts less similar, fewer are faster
_WORD_WEIGHT, _TRIGRAM_WEIGHT = 1.0, 0.4
_VERSION = "1"
_BLOCK = 32  # texts summed at once, so that they fit the processor's cache
_REMEMBERED = 16_384  # words whose features are cached
_Features = tuple[bytes, bytes, int]  # coordinates as int64, values as float64 (bytes are joined fastest), and how many


class HashingBackend(Backend):
    """Backend of the models `hash:<dimension>`. A token's ids are its characters; a space separates two tokens."""

    def __init__(self, model: str, query_prompt: str = "", document_prompt: str = "") -> None:
        self.profile = DeviceProfile.cpu()
        number = model.removeprefix(PREFIX)
        if not number.isdecimal() or not _LEAST <= int(number) <= _MOST:
            raise ModelNotFound(f"model {model!r}: a hashing model is hash:N with N from {_LEAST} to {_MOST}")
        dimension = int(number)
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
            query_prompt=query_prompt,
            document_prompt=document_prompt,
        )
        self._known: dict[str, _Features] = {}
        where, value, _ = next(_features([""], [1.0], dimension, [0, 1]))
        self._blank = np.bincount(np.frombuffer(where, np.int64), np.frombuffer(value), dimension)

    def tokenize(self, texts: Sequence[str]) -> TokenBatch:
        words = [_TOKEN.findall(text)[:_MAX_TOKENS] for text in texts]
        joined = [" ".join([*each, ""]).lower() for each in words]
        ids = np.frombuffer("".join(joined).encode("utf-32-le", "surrogatepass"), dtype="<i4").astype(np.int32)
        offsets = np.cumsum([0, *map(len, joined)], dtype=np.intp)
        return TokenBatch(ids, offsets, np.fromiter(map(len, words), np.intp, len(words)))

    def count(self, texts: Sequence[str]) -> list[int]:
        return [len(_TOKEN.findall(text)) for text in texts]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        return [match.span() for match in _TOKEN.finditer(text)]

    def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
        words, dimension = words_of(batch), self.info.dimension
        needed = set(words)
        unknown = [word for word in needed if word not in self._known]
        if len(self._known) + len(unknown) > _REMEMBERED:
            self._known, unknown = {}, list(needed)
        # The features of a word are the word and its letter trigrams, which words of the same stem share.
        names: list[str] = []
        weights: list[float] = []
        ends = [0]
        for word in unknown:
            edged = f"<{word}>"
            grams = [edged[start : start + 3] for start in range(len(edged) - 2)]
            names += (f"={word}", *grams)
            weights += (_WORD_WEIGHT, *[_TRIGRAM_WEIGHT / max(1, len(grams)) ** 0.5] * len(grams))
            ends.append(len(names))
        known = self._known
        known |= zip(unknown, _features(names, weights, dimension, ends), strict=True)
        vectors = np.empty((len(batch), dimension), dtype=np.float32)
        ends = np.append(0, np.cumsum(batch.lengths)).tolist()
        for start in range(0, len(batch), _BLOCK):
            lengths = batch.lengths[start : start + _BLOCK]
            # A row for each text: the sum of its features at each coordinate, added in order.
            sums: NDArray[Any] = np.zeros((len(lengths), dimension))
            if some := words[ends[start] : ends[start + len(lengths)]]:
                wheres, values, sizes = zip(*map(known.__getitem__, some), strict=True)
                rows = np.repeat(np.arange(len(lengths)) * dimension, lengths)
                places = np.frombuffer(b"".join(wheres), np.int64) + np.repeat(rows, sizes)
                sums = np.bincount(places, np.frombuffer(b"".join(values)), sums.size).reshape(sums.shape)
            cancelled = ~sums.any(axis=1)  # no features, or all of them cancelled out: an empty text
            if cancelled.any():
                sums[cancelled] = self._blank
            vectors[start : start + len(lengths)] = sums
        return vectors


def words_of(batch: TokenBatch) -> list[str]:
    """Return the tokens of all texts; NUL becomes an empty token."""
    text = batch.ids.astype("<i4").tobytes().decode("utf-32-le", "surrogatepass")
    return text.replace("\0", "").split(" ")[:-1]


def _features(
    names: Sequence[str], weights: Sequence[float], dimension: int, ends: Sequence[int]
) -> Iterator[_Features]:
    """Yield the features of each word. `ends`: where its names and weights begin and end."""
    drawn = np.frombuffer(b"".join(map(_digest, names)), dtype="<u4").reshape(len(names), _PLACES)
    values = (np.where(drawn & 1, 1.0, -1.0) * np.asarray(weights)[:, None]).tobytes()
    places = ((drawn >> 1).astype(np.int64) % dimension).tobytes()
    for start, end in pairwise(end * _PLACES * 8 for end in ends):
        yield places[start:end], values[start:end], (end - start) // 8


@lru_cache(maxsize=32_768)
def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4 * _PLACES).digest()

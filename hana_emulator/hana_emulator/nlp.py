"""The NLP service behind VECTOR_EMBEDDING and CROSS_ENCODE: SAP's models by name, computed by hashing or by functions
of the caller. Its vectors and scores are not those of SAP's models.

Errors of arguments have code 8, which is this emulator's choice; HANA's codes are unknown.
"""

from __future__ import annotations

import importlib
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hana_emulator.errors import HanaError

# texts and their type ('DOCUMENT' or 'QUERY') -> one vector for each text
Embedder = Callable[[Sequence[str], str], Sequence[Any]]
# query and documents -> one score for each document, higher is better
Reranker = Callable[[str, Sequence[str]], Sequence[float]]

FUNCTIONS = ("VECTOR_EMBEDDING", "CROSS_ENCODE")
EMBEDDING_MODELS = frozenset({"SAP_NEB.20240715", "SAP_GXY.20250407"})
RERANKING_MODELS = frozenset({"SAP_CER.20250701"})
TEXT_TYPES = frozenset({"DOCUMENT", "QUERY"})
DIMENSION = 768
TOKENS = 256  # SAP's documented limit of SAP_NEB.20240715; here a token is a word or a punctuation mark
_TOKEN = re.compile(r"\w+|[^\w\s]")
_COORDINATES = 32  # Each token changes this many coordinates
_WEIGHT_OF_WHOLE_TEXT = 0.2  # Texts of the same words in another order get vectors that are close, but not equal
_KEPT_VECTORS = 2_000


@dataclass(slots=True)
class Nlp:
    """The service. Without `embedder` and `reranker` it hashes words. One call of these functions runs at a time.

    `refused`: the HANA error code (258 or 328) of an instance without the service; None for an instance with it.
    """

    embedder: Embedder | None = None
    reranker: Reranker | None = None
    refused: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _vectors: Callable[[str, str, str], Any] = field(init=False)

    def __post_init__(self) -> None:
        self._vectors = lru_cache(_KEPT_VECTORS)(self._embedded)

    def refusals(self) -> dict[str, HanaError]:
        """The functions that this instance lacks, with the error that a statement with one of them gets."""
        if self.refused is None:
            return {}
        if self.refused == 258:
            return dict.fromkeys(FUNCTIONS, HanaError(258, "insufficient privilege: Not authorized"))
        return {name: HanaError(328, f"invalid name of function or procedure: {name}") for name in FUNCTIONS}

    def embed(self, text: str, text_type: str | None, model: str | None, *source: str | None) -> Any:
        """Return the vector of `text`: of 768 elements, or of as many as the caller's embedder gives. `source`: the
        remote source, or its schema and name; it can have models of any name."""
        if text_type not in TEXT_TYPES:
            raise _invalid("the text type of VECTOR_EMBEDDING must be 'DOCUMENT' or 'QUERY'")
        if not model or not (model in EMBEDDING_MODELS or (source and source[-1])):
            raise _invalid("unknown model of VECTOR_EMBEDDING")
        return self._vectors(text, text_type, model)

    def _embedded(self, text: str, text_type: str, model: str) -> Any:
        if self.embedder is None:
            return hashed(text, model)
        with self._lock:
            return self.embedder([text], text_type)[0]

    def score(self, document: str, query: str, model: str | None) -> float:
        """Return how well `document` answers `query`; the hashing scorer's scores are in [0, 1]."""
        if model not in RERANKING_MODELS:
            raise _invalid("unknown model of CROSS_ENCODE")
        if self.reranker is None:
            return _overlap(query, document)
        with self._lock:
            return float(self.reranker(query, [document])[0])


def _invalid(detail: str) -> HanaError:
    return HanaError(8, f"invalid argument: {detail}")


def function_named(name: str) -> Callable[..., Any]:
    """Import the function `package.module:function`. Raises ValueError if there is none."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot import {name} as package.module:function: {error}") from None
    if not callable(function):
        raise ValueError(f"{name} is not a function")
    return function  # type: ignore[no-any-return]


def hashed(text: str, model: str) -> NDArray[np.float64]:
    """A vector of length 1 from the first 256 tokens of `text`; texts with common words are close. Each model has
    directions of its own, so vectors of two models are about orthogonal."""
    found = list(islice(_TOKEN.finditer(text), TOKENS))
    kept = text[: found[-1].end()] if found else ""
    vector = np.zeros(DIMENSION)
    parts = [(f" {kept}", _WEIGHT_OF_WHOLE_TEXT), *((token, math.sqrt(n)) for token, n in _counted(kept).items())]
    for part, weight in parts:
        places, signs = _direction(f"{model} {part}")
        np.add.at(vector, places, weight * signs)
    return vector / np.linalg.norm(vector)


def _counted(text: str) -> Counter[str]:
    return Counter(_TOKEN.findall(text.lower()))


@lru_cache(maxsize=20_000)
def _direction(part: str) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    digest = blake2b(part.encode("utf-8", "surrogatepass"), digest_size=2 * _COORDINATES).digest()
    numbers = np.frombuffer(digest, "<u2").astype(np.intp)
    return numbers % DIMENSION, np.where(numbers < 1 << 15, 1.0, -1.0)


def _overlap(query: str, document: str) -> float:
    """The cosine of the two texts' word counts."""
    one, other = _counted(query), _counted(document)
    norms = math.sqrt(sum(n * n for n in one.values()) * sum(n * n for n in other.values()))
    return min(1.0, sum(n * other[token] for token, n in one.items()) / norms) if norms else 0.0

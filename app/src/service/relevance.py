"""The relevance of hits, from 0 to 1: a score compared with the best scores that unrelated queries reach in the same
collection."""

from __future__ import annotations

import math
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.src.service.collections import VisibleView
from app.src.service.wiring import EngineEmbedder
from connector.cancellation import Cancellation, cancelled_by
from connector.discovery.sap_tables import COLUMNS
from connector.document.document import document_id, parse_id
from connector.stores.ranking import Backdrop, closeness, units, without_hubs
from connector.stores.records import FOREIGN
from connector.stores.scan import single_threaded

FLOOR = 0.2  # a hit below it is probably irrelevant
SAMPLED = 2_000  # rows whose vectors calibrate a collection
# Cached calibrations, by collection and row filter. One costs several searches; a few new rows hardly change it.
CALIBRATIONS, CALIBRATION_SECONDS = 256, 60.0
NO_BACKDROP_SECONDS = 5.0  # how long "too few rows" is cached: a sync may be adding more
LANGUAGES = 4  # in which a row's translations are looked for
# Relevance of a score equal to the median and to this quantile of the unrelated queries' best scores.
_USUAL, _QUANTILE = 0.05, 0.97
_NARROWEST = 0.02  # distance of the two, in cosines, where unrelated queries score alike
_WORDS_POWER = 1.75  # half of the words give 0.3, a third 0.15

UNRELATED: Sequence[str] = tomllib.loads(files(__package__).joinpath("relevance.toml").read_text("utf-8"))[
    "unrelated"
].splitlines()


def by_words(share: float) -> float:
    """Return the relevance of a hit that has this share of the query's words, for searches without a vector."""
    return float(share**_WORDS_POWER)


def _quantiles(values: NDArray[np.float64], *shares: float) -> list[float]:
    """Return the same as numpy.quantile, which imports numpy.ma (20 ms)."""
    found: list[float] = np.interp(
        np.array(shares) * (len(values) - 1), np.arange(len(values)), np.sort(values)
    ).tolist()
    return found


def _logit(share: float) -> float:
    return math.log(share / (1 - share))


@dataclass(frozen=True, slots=True)
class Scale:
    """`usual` and `floor`: the median and a high quantile of the best scores of unrelated queries."""

    usual: float
    floor: float

    @classmethod
    def of(cls, scores: NDArray[np.float64], rows: int) -> Scale:
        """Return the scale of the scores (n, m) of m unrelated queries with a sample of n of `rows` rows. The best of
        all rows is estimated from the best of a quarter of the sample and of the sample: each fourfold adds as much."""
        best, count = scores.max(axis=0), len(scores)
        if rows > count >= 4:
            (gained,) = _quantiles(best - scores[: count // 4].max(axis=0), 0.5)
            best = best + gained * math.log(rows / count, 4)
        usual, floor = _quantiles(best, 0.5, _QUANTILE)
        return cls(usual, max(floor, usual + _NARROWEST))

    def relevance(self, score: float) -> float:
        """Return a logistic function of the score: FLOOR at the floor, _USUAL at the usual score."""
        slope = (_logit(FLOOR) - _logit(_USUAL)) / (self.floor - self.usual)
        return 1 / (1 + math.exp(-max(-50.0, min(50.0, _logit(FLOOR) + slope * (score - self.floor)))))


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is known of a collection's visible rows and one model. `unrelated`: unit vectors of UNRELATED, None without
    a model. `cosine`, `near`: the scales of cosines and of `nearness`, None without a model or rows.
    `language`: the key column that holds a language; `languages`: the most frequent ones there, at most LANGUAGES."""

    backdrop: Backdrop | None
    unrelated: NDArray[np.float64] | None = None
    cosine: Scale | None = None
    near: Scale | None = None
    language: int = -1
    languages: tuple[str, ...] = ()

    def translations(self, id_: str) -> list[str]:
        """Return the ids that the same row has in the other languages; [] if its key has no language."""
        if len(self.languages) < 2 or id_.startswith(FOREIGN):
            return []
        key = parse_id(id_)
        if not -len(key) <= self.language < len(key):
            return []
        before, after, mine = key[: self.language], key[self.language + 1 :], key[self.language]
        return [document_id((*before, other, *after)) for other in self.languages if other != mine]

    def nearness(self, queries: NDArray[np.floating[Any]], vectors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the closeness (n, m) of unit vectors (n, d) to unit queries (m, d), corrected for hubs."""
        if self.unrelated is None:
            return closeness(queries, vectors, self.backdrop)
        # Together, because the backdrop is taken off all vectors.
        close = closeness(np.concatenate([queries, self.unrelated]), vectors, self.backdrop)
        return without_hubs(close[:, : len(queries)], close[:, len(queries) :])


class Calibrations:
    """Caches calibrations for CALIBRATION_SECONDS, and the vectors of UNRELATED by model. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[tuple[str, int, str], str], tuple[threading.Lock, float, Calibration]] = {}
        self._unrelated: dict[str, NDArray[np.float64]] = {}

    def of(self, view: VisibleView, embedder: EngineEmbedder | None, key_columns: Sequence[str] = ()) -> Calibration:
        """Return the calibration of the rows of `view`, from a sample. `embedder` None: the backdrop alone. The first
        call embeds UNRELATED. Raises the errors of the view and the engine."""
        key = view.key, embedder.fingerprint if embedder is not None else ""
        with self._lock:
            lock, end, known = self._known.pop(key, (threading.Lock(), 0.0, Calibration(None)))
            self._known[key] = lock, end, known  # the last used comes last
            for oldest in list(self._known)[:-CALIBRATIONS]:
                del self._known[oldest]
        with lock:  # concurrent searches share one computation
            _, end, known = self._known.get(key, (lock, end, known))
            if time.monotonic() >= end:
                with cancelled_by(Cancellation()):  # if this caller cancels, others still wait for it
                    known = self._measured(view, embedder, key_columns)
                lasts = NO_BACKDROP_SECONDS if known.backdrop is None else CALIBRATION_SECONDS
                self._known[key] = lock, time.monotonic() + lasts, known
            return known

    def _measured(self, view: VisibleView, embedder: EngineEmbedder | None, key_columns: Sequence[str]) -> Calibration:
        sample = view.sample(SAMPLED, texts=False)
        language = next((place for place, name in enumerate(key_columns) if name in COLUMNS["language"]), -1)
        counted = Counter[str]()
        if language >= 0:
            keys = [parse_id(row.id) for row in sample.chosen if not row.id.startswith(FOREIGN)]
            counted.update(str(key[language]) for key in keys if len(key) == len(key_columns))
        languages = tuple(code for code, _ in counted.most_common(LANGUAGES))
        vectors = units(view.vectors(sample.chosen))
        vectors = vectors[np.any(vectors != 0, axis=1)]
        unrelated = None
        if embedder is not None:
            unrelated = self._unrelated.get(embedder.fingerprint)
            if unrelated is None:
                unrelated = units(embedder.embed_queries(UNRELATED))
                self._unrelated[embedder.fingerprint] = unrelated
        with single_threaded():
            found = Calibration(Backdrop.of(vectors), unrelated, language=language, languages=languages)
            if unrelated is None or not len(vectors):
                return found
            cosine, near = vectors @ unrelated.T, found.nearness(unrelated, vectors)
            return replace(found, cosine=Scale.of(cosine, sample.rows), near=Scale.of(near, sample.rows))

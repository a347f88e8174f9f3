"""What every worker that embeds texts answers to: load a model, find its best setting, embed. A worker hands over how
to load; what that gives embeds texts with one of its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from answering import answer, read_json, timed

Encode = Callable[[list[str], Any], Any]
"""Texts and a setting -> unit vectors (n, dimension), in order."""
BATCH_SIZES = (8, 16, 32, 64)
BUDGETS = (512, 1024, 4096)  # tokens of a batch, where batches are sorted by length in tokens


@dataclass(frozen=True)
class Loaded:
    """`settings`: what `encode` may be told, the best of which is looked for on the texts to be measured. `about`: what
    the report should say of it."""

    encode: Encode
    settings: Sequence[Any]
    about: dict[str, Any]


@dataclass(frozen=True)
class Wish:
    """`model`: a sentence-transformers folder. `cache`: a folder for what takes long to make. `how`: of the peer's
    variant, such as {"int8": true}."""

    model: str
    device: str
    threads: int
    cache: Path
    how: dict[str, Any]


class Worker:
    def __init__(self, load: Callable[[Wish], Loaded]) -> None:
        self._load = load
        self._texts: dict[str, list[str]] = {}
        self._best: dict[str, Any] = {}

    def load(self, model: str, device: str, threads: int, cache: str, how: dict[str, Any]) -> dict[str, Any]:
        wish = Wish(model, device, threads, Path(cache), how)
        self._loaded, took = timed(lambda: self._load(wish))
        return {"load_seconds": took["seconds"], "about": self._loaded.about}

    def tune(self, texts: str) -> dict[str, Any]:
        """Every setting once on all the texts, after one that warms up; the fastest is kept for them."""
        given = self._read(texts)
        settings = self._loaded.settings
        self._loaded.encode(given[: max(8, len(given) // 4)], settings[0])
        took = [timed(lambda: self._loaded.encode(given, each))[1]["seconds"] for each in settings]  # noqa: B023
        self._best[texts] = settings[took.index(min(took))]
        return {"setting": self._best[texts], "tried": dict(zip(map(str, settings), took, strict=True))}

    def embed(self, texts: str, out: str | None = None) -> dict[str, Any]:
        setting = self._best.get(texts, self._loaded.settings[0])
        vectors, took = timed(lambda: self._loaded.encode(self._read(texts), setting))
        if out is not None:
            np.save(out, np.asarray(vectors, dtype=np.float32))
        return dict(took)

    def _read(self, file: str) -> list[str]:
        if file not in self._texts:
            self._texts[file] = read_json(file)
        return self._texts[file]


def serve(packages: Sequence[str], load: Callable[[Wish], Loaded]) -> None:
    worker = Worker(load)
    answer(packages, load=worker.load, tune=worker.tune, embed=worker.embed)


def by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Positions in batches of like lengths, longest first; a batch costs its longest text times its size."""
    batches: list[list[int]] = []
    longest = 0
    for position in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        if batches and longest * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(position)
        else:
            batches.append([position])
            longest = max(1, lengths[position])
    return batches


def pooling_of(model: str) -> str:
    """`mean` or `cls`, as the folder says."""
    config = read_json(str(Path(model) / "1_Pooling" / "config.json"))
    return "cls" if config.get("pooling_mode_cls_token") or config.get("pooling_mode") == "cls" else "mean"


def max_length_of(model: str) -> int:
    return int(read_json(str(Path(model) / "sentence_bert_config.json"))["max_seq_length"])

"""A worker's process: loads engines and embeds blocks of texts. It returns errors as values, because Ray loses the
attributes of a raised error."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.src.core.backends import DeviceFailed, EngineError, InputType, Vectors
from app.src.core.device import DeviceProfile, Precision
from app.src.core.loading import EngineOptions, load_engine
from app.src.core.queue import EngineStats, Lane
from connector.extras import DISTRIBUTION

if TYPE_CHECKING:
    from app.src.core.engine import Engine

# Packages whose versions decide what a pickle means or which vectors a model gives.
PACKAGES = (DISTRIBUTION, "ray", "numpy", "tokenizers", "torch", "transformers", "sentence-transformers")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed PACKAGES, without the local part, such as +cu126."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name).partition("+")[0]
    return found


@dataclass(eq=False)
class Loaded:
    """Facts of a worker's engine, as in Engine; also those of a WorkerEngine."""

    dimension: int
    fingerprint: str
    profile: DeviceProfile
    precision: Precision
    precision_reason: str
    path: str
    path_reason: str
    token_budget: int
    planned_tokens: int


@dataclass(frozen=True, slots=True)
class Block:
    """Texts to embed, as for `Engine.submit`. `fingerprint`: of the model; a worker with another one refuses."""

    texts: Sequence[str]
    lane: Lane | None
    input_type: InputType
    normalize: bool
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Answer:
    """`counts`: tokens of each whole text; `worker`: an id; `stats`: of the worker's engine since it was loaded."""

    vectors: Vectors
    counts: list[int]
    worker: str
    stats: EngineStats


class Worker:
    """Thread-safe. Keeps each engine that it loads."""

    def __init__(self) -> None:
        self._id = secrets.token_hex(8)
        self._engines: dict[EngineOptions, Engine] = {}
        self._loading = threading.Lock()

    def report(self) -> dict[str, Any]:
        """Return the worker's process, machine and versions. `gpus`: CUDA_VISIBLE_DEVICES, None if it is not set;
        `device`: None before a model is loaded."""
        # Set by Ray for this process, not by a user.
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")  # noqa: TID251 # nosemgrep: owl-environment - no setting
        device = next((engine.profile.name for engine in self._engines.values()), None)
        return {"pid": os.getpid(), "host": platform.node(), "gpus": gpus, "device": device, "versions": versions()}

    def load(self, options: EngineOptions) -> Loaded | EngineError:
        try:
            engine = self.engine(options)
        except Exception as error:
            found = _of_engine(error)
            found.args = (f"{platform.node()}: {found}",)
            return found
        return Loaded(**{name: getattr(engine, name) for name in Loaded.__annotations__})

    def embed(self, options: EngineOptions, block: Block) -> Answer | EngineError:
        """Embed a block; load the model first if this process is new."""
        counts: list[int] = []
        try:
            engine = self.engine(options)
            if engine.fingerprint != block.fingerprint:
                raise DeviceFailed(
                    f"{platform.node()} has another {engine.model}: its fingerprint is {engine.fingerprint}, not "
                    f"{block.fingerprint}; give all nodes the same model files"
                )
            vectors = engine.submit(
                block.texts, block.lane, input_type=block.input_type, normalize=block.normalize, counted=counts.extend
            ).result()
        except Exception as error:
            return _of_engine(error)
        return Answer(vectors, counts, self._id, engine.stats())

    def run(self, work: Callable[..., Any], *content: object) -> Any:
        """Return `work(self, *content)`; `work` is a function of a module, which must return its errors."""
        return work(self, *content)

    def engine(self, options: EngineOptions) -> Engine:
        """Load the model once. Raises as `load_engine`."""
        with self._loading:
            if options not in self._engines:
                self._engines[options] = load_engine(options)
            return self._engines[options]


def _of_engine(error: Exception) -> EngineError:
    return error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__} in a worker: {error}")

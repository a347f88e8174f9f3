"""A run of the proof as its parts see it: device, models, time; and processes of their own for whatever may end one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.src.benchmark.harness import Figure, Target, significant
from app.src.core.agreement import agreement
from app.src.core.device import DeviceProfile, detect
from app.src.core.engine import EmbeddingEngine
from app.src.core.loading import EngineOptions, load_engine
from app.src.core.nvml import snapshot

from .models import SHAPES, TINY, Shape, make, minilm


@dataclass(frozen=True, slots=True)
class Run:
    """`ends`: by time.monotonic, when a part begins nothing new. `start`: how processes are started, fork or spawn.
    `folder`: for model folders, shared by all parts. `quick`: tiny models and few texts."""

    device: str
    folder: Path
    ends: float
    quick: bool = False
    rounds: int = 3
    precision: str = "auto"
    model: Path | None = None
    start: str = "fork"

    @property
    def profile(self) -> DeviceProfile:
        """Return the device's profile. On a card this begins to use CUDA in this process."""
        return detect(self.device)

    @property
    def on_card(self) -> bool:
        return self.device != "cpu"

    @property
    def left(self) -> float:
        """Return the seconds until `ends`."""
        return self.ends - time.monotonic()

    def goal(self, target: Target | None) -> Target | None:
        """Return the target where it counts: real shapes on a card."""
        return target if self.on_card and not self.quick else None

    def folder_of(self, name: str) -> tuple[Shape, Path]:
        """Return the shape and folder of a model, and make it once."""
        shape, place = (TINY if self.quick else SHAPES)[name], self.folder / name
        if not place.exists():
            make(place, shape, minilm(self.model))
        return shape, place

    def options(self, name: str, **more: Any) -> EngineOptions:
        _, folder = self.folder_of(name)
        return EngineOptions(str(folder), **{"device": self.device, "precision": self.precision} | more)

    def engine(self, name: str, **more: Any) -> EmbeddingEngine:
        """Load our engine on one device. `more`: further EngineOptions."""
        engine = load_engine(self.options(name, **more))
        assert isinstance(engine, EmbeddingEngine)
        return engine


# Yields figures; and sentences, which become notes of the report.
Part = Callable[[Run], Iterable[Figure | str]]


def described(run: Run) -> Iterator[dict[str, object]]:
    """Yield what the report says of the device. Makes the model that most parts need."""
    run.folder_of("minilm")
    profile = run.profile
    about: dict[str, object] = {"device": profile.torch_name}
    if profile.kind == "cuda":
        import torch

        torch.ones(1, device=profile.torch_name)
        found = snapshot()
        about |= {
            "card": profile.name,
            "cards": torch.cuda.device_count(),
            "compute_capability": profile.dotted_capability,
            "card_memory_bytes": profile.memory_bytes,
            "driver": found.driver_version or found.reason,
            "torch_cuda": torch.version.cuda,
        }
    yield about


class WrongVectors(Exception):
    """A way to compute gave other vectors, or texts were lost."""


LEAST_COSINE = 0.999


class PartFailed(Exception):
    """The work in another process raised, was ended, or took too long."""


def guarded(name: str, work: Callable[[], Iterable[Figure | str]]) -> Iterator[Figure | str]:
    """Turn an error of one step of a part into a failed figure, so that the part goes on."""
    try:
        yield from work()
    except Exception as error:
        traceback.print_exc()
        yield Figure(name, (), error=f"{type(error).__name__}: {error}"[:300])


def apart(start: str, work: Callable[[], Iterable[Any]], ends: float) -> Iterator[Any]:
    """Yield what `work` yields in a process of its own, so that a CUDA error, a crash or a hang ends only that one.

    `start` "fork" takes no time, and requires that this process has not used CUDA. `ends`: by time.monotonic; then the
    process and its children are ended. Raises PartFailed.
    """
    context: Any = multiprocessing.get_context(start)
    receiving, sending = context.Pipe(duplex=False)
    outermost = multiprocessing.parent_process() is None
    process = context.Process(target=_send_all, args=(work, sending, outermost))
    process.start()
    sending.close()
    try:
        while True:
            if not receiving.poll(max(0.0, ends - time.monotonic())):
                raise PartFailed("out of time: ended")
            try:
                found = receiving.recv()
            except EOFError:
                process.join(5)
                if process.exitcode:
                    raise PartFailed(f"the process ended with exit code {process.exitcode}") from None
                return
            if isinstance(found, PartFailed):
                raise found
            yield found
    finally:
        if outermost:
            with contextlib.suppress(ProcessLookupError):  # the process and all that it started
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        receiving.close()


def _send_all(work: Callable[[], Iterable[Any]], sending: Any, leads_group: bool) -> None:
    if leads_group:
        os.setpgid(0, 0)
    try:
        for each in work():
            sending.send(each)
    except Exception as error:
        traceback.print_exc()
        sending.send(PartFailed(f"{type(error).__name__}: {error}"[:300]))
    sending.close()
    sys.stderr.flush()
    os._exit(0)  # frees nothing on a card that has failed


def same(name: str, found: Any, wanted: Any, least: float = LEAST_COSINE) -> None:
    """Raise WrongVectors unless each row has at least this cosine with the wanted one."""
    cosine = agreement(np.asarray(found, np.float32), np.asarray(wanted, np.float32))[1]
    if not cosine >= least:
        raise WrongVectors(f"{name}: least cosine {significant(cosine, 6)}, needed {least}")

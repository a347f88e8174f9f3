"""Where graphs run: the device, the runtime that is installed for it, and sessions on it in shapes that its memory
holds. Knows devices and providers; not which graph runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..backends import DeviceUnavailable
from ..backends.onnx import MakeSession, Session, make_session
from ..device import DeviceError, DeviceProfile, Precision, choose_precision, detect
from ..memory import MemoryLimits, ModelShape, T4MemoryManager
from .graph import GraphPrecision
from .providers import (
    BuildOptions,
    EngineFolder,
    Installed,
    Provider,
    Runtime,
    ShapeProfile,
    choose_runtime,
    cpu_provider,
    cuda_provider,
    preload,
    refusal_of_onnxruntime,
    tensorrt_provider,
)


@dataclass(frozen=True, slots=True)
class Site:
    """Where graphs run, and with what. `threads`: ONNX Runtime's on a CPU. `memory_limit`: bytes for CUDA's arena."""

    profile: DeviceProfile
    runtime: Runtime
    installed: Installed
    build: BuildOptions = field(default_factory=BuildOptions)
    threads: int | None = None
    memory_limit: int = 0
    make: MakeSession = make_session

    def plain(self, graph: bytes | Path) -> Session:
        """On CUDA or the CPU."""
        preload(self.runtime)
        return self.make(graph, self._below(), self.threads)

    def _below(self) -> list[Provider]:
        """What computes the nodes that TensorRT does not take."""
        on_card = self.runtime != "cpu"
        return [*([cuda_provider(self.profile, self.memory_limit)] if on_card else []), cpu_provider()]

    def through_tensorrt(
        self, graph: Path, precision: Precision, shapes: ShapeProfile, folder: EngineFolder
    ) -> Session:
        preload(self.runtime)
        first = tensorrt_provider(self.profile, precision, shapes, folder, self.build)
        return self.make(graph, [first, *self._below()], self.threads)

    def card(self) -> dict[str, str | int | float | None]:
        """What of the card, its driver and the libraries an engine depends on."""
        capability = None if self.profile.capability is None else ".".join(map(str, self.profile.capability))
        return {"gpu": self.profile.name, "capability": capability, **self.installed.as_dependencies()}

    def float_precision(self, requested: str) -> tuple[GraphPrecision, str]:
        """For `requested` (int8 counts as auto here) and the reason. Raises DeviceUnavailable."""
        asked = "auto" if requested == "int8" else requested
        if asked not in ("auto", "fp32", *(["fp16"] if self.runtime != "cpu" else [])):
            where = "on a CPU in fp32 or int8" if self.runtime == "cpu" else "on a card in fp32, fp16 or int8"
            raise DeviceUnavailable(f"precision {asked}: ONNX Runtime computes {where} here; use auto")
        if self.runtime == "cpu":
            return "fp32", "ONNX Runtime on a CPU" if asked == "auto" else "asked for"
        try:
            chosen, reason = choose_precision(self.profile, asked)
        except DeviceError as error:
            raise DeviceUnavailable(str(error)) from error
        return ("fp16" if chosen == "fp16" else "fp32"), reason

    def shapes(self, shape: ModelShape, precision: Precision, limits: MemoryLimits) -> ShapeProfile:
        """By the memory of the card, whatever is free now: else an engine would be built anew at every start."""
        budget = T4MemoryManager(self.profile, limits).plan_for(shape, precision)
        whole = 1 << (budget.bit_length() - 1)
        return ShapeProfile.planned(whole, shape.max_tokens)


@dataclass(frozen=True, slots=True)
class Found:
    """A site, and why graphs run this way there."""

    site: Site
    reason: str


def find_site(
    device: str = "auto",
    build: BuildOptions | None = None,
    limits: MemoryLimits | None = None,
    threads: int | None = None,
) -> Found:
    """Raises DeviceUnavailable where ONNX Runtime is not installed or there is no such device."""
    installed = Installed.found()
    if (missing := refusal_of_onnxruntime(installed)) is not None:
        raise DeviceUnavailable(missing)
    try:
        profile = detect(device)
    except DeviceError as error:
        raise DeviceUnavailable(str(error)) from error
    chosen = choose_runtime(profile, installed)
    allowed = int(profile.memory_bytes * (limits or MemoryLimits()).fraction) if profile.kind == "cuda" else 0
    site = Site(profile, chosen.runtime, installed, build or BuildOptions(), threads, allowed)
    return Found(site, chosen.reason)

"""Which torch is installed, and which published build of it a card needs: kernels for its compute capability, and a
driver that is new enough, or still knows the card. Never imports torch.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .cards import Capability
from .nvml import DRIVER_FLOORS

LAST_DRIVER: tuple[tuple[Capability, int], ...] = (((7, 5), 580),)
"""Below this compute capability, the last driver branch that knows the card: R580 for Maxwell, Pascal and Volta."""


@dataclass(frozen=True, slots=True)
class Build:
    """A build of torch for Linux. `torch`: its newest release that pyproject.toml takes; `last`: the last that there is
    of this build, None while it goes on; `index`: where pip finds it, None for PyPI."""

    torch: str
    cuda: str
    architectures: tuple[str, ...]
    index: str | None = None
    last: str | None = None

    @property
    def driver(self) -> int:
        """The oldest driver branch that runs it."""
        return next(floor for cuda, floor in DRIVER_FLOORS if int(self.cuda.partition(".")[0]) >= cuda)

    @property
    def command(self) -> str:
        return f"pip install 'torch=={self.torch}.*'" + (f" --index-url {self.index}" if self.index else "")


_CUDA_12_6 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
_CUDA_12_8 = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
_CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
# Read out of the wheels; that cu126 ends with 2.14: pytorch issues 190355, 190385. Best first.
BUILDS: tuple[Build, ...] = (
    Build("2.13", "13.0", _CUDA_13),
    Build("2.13", "12.6", _CUDA_12_6, "https://download.pytorch.org/whl/cu126", last="2.14"),
    Build("2.10", "12.8", _CUDA_12_8),
)


def builds_for(capability: Capability, driver: int | None = None) -> list[Build]:
    """Those with kernels for the card that this driver branch runs (None: any driver), best first."""
    fitting = [build for build in BUILDS if kernels_exist(build.architectures, capability)]
    return [build for build in fitting if driver is None or build.driver <= driver]


def driver_floor(capability: Capability) -> int | None:
    """The oldest driver branch with which some build runs on the card; None where no build has kernels for it."""
    return min((build.driver for build in builds_for(capability)), default=None)


def driver_ceiling(capability: Capability) -> int | None:
    """The newest driver branch that still knows the card; None while none has dropped it."""
    return next((branch for below, branch in LAST_DRIVER if capability < below), None)


def what_to_install(capability: Capability, driver: int | None = None) -> str:
    """One sentence without a full stop: the command, and the drivers that it goes with."""
    builds = builds_for(capability, driver)
    if not builds:
        older = builds_for(capability)
        dotted = ".".join(map(str, capability))
        if not older:
            return f"no build of torch that this version takes has kernels for compute capability {dotted}"
        wanted = _drivers(older[0], capability)
        return f"driver {driver} is too old for every build with kernels for {dotted}: install {wanted}"
    best = builds[0]
    ends = f", published up to torch {best.last}" if best.last else ""
    return f"{best.command} (built for CUDA {best.cuda}{ends}; driver {_drivers(best, capability)})"


def _drivers(build: Build, capability: Capability) -> str:
    ceiling = driver_ceiling(capability)
    return f"{build.driver} or newer" if ceiling is None else f"{build.driver} to {ceiling}"


def kernels_exist(built_for: Sequence[str], capability: Capability) -> bool:
    """Whether a torch built for these architectures (`sm_75`, `compute_90` ...) runs on the capability: a cubin of the
    same major and no higher minor version, or PTX of any lower one. No list says nothing: True."""
    if not built_for:
        return True
    for name in built_for:
        flavour, _, digits = name.rstrip("af").partition("_")
        architecture = (int(digits[:-1]), int(digits[-1]))
        same_major = architecture[0] == capability[0]
        if architecture <= capability and (same_major or flavour == "compute"):
            return True
    return False


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """`cuda`: the version that it was built for; None for a build for the CPU (or another maker's cards)."""

    version: str
    cuda: str | None


def torch_build() -> TorchBuild | None:
    """The torch that is installed, read from its `version.py` without importing it, which takes seconds and fails where
    a CUDA library is missing. None when there is none."""
    try:
        spec = importlib.util.find_spec("torch")
    except ImportError:
        return None
    if spec is None or spec.origin is None:
        return None
    try:
        tree = ast.parse((Path(spec.origin).parent / "version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return TorchBuild("unknown", None)
    values: dict[str, object] = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and isinstance(value := getattr(node, "value", None), ast.Constant):
            values[target.id] = value.value
    cuda = values.get("cuda")
    return TorchBuild(str(values.get("__version__", "unknown")), cuda if isinstance(cuda, str) else None)

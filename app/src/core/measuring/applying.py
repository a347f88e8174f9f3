"""The settings that torch keeps for a whole process: which ones this device wants, what stood there before, and why.
Without `--apply` they are only told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..device import DeviceProfile, Precision
from .products import set_tf32

MATMUL = "float32_matmul_precision"
TF32_ON, TF32_OFF = "high", "highest"
# Segments that grow instead of being many of fixed size: batches of ever other sizes fragment memory less. Source:
# PyTorch, CUDA semantics, PYTORCH_ALLOC_CONF.
EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True, slots=True)
class Change:
    """`old` None: torch does not tell. `applied` False: not asked for, or not to be had here, as `reason` says."""

    name: str
    old: str | bool | None
    new: str | bool | None
    applied: bool
    reason: str


def changes(profile: DeviceProfile, precision: Precision, *, apply: bool) -> list[Change]:
    """What this process has, and what it should have for an engine of this precision; set, where `apply`. To be called
    before anything else has set TF32 or used the card: torch raises when its old and new TF32 switches are mixed, and
    memory that the allocator has got already stays as it is."""
    return [*_tf32(profile, precision, apply), *_cudnn(profile, apply), *_allocator(profile, apply)]


def _tf32(profile: DeviceProfile, precision: Precision, apply: bool) -> Iterator[Change]:
    import torch

    old = _asked(torch.get_float32_matmul_precision)
    if not profile.tf32:
        yield Change(MATMUL, old, old, False, "this device has no TF32: the switch would change nothing")
        return
    wanted = precision == "tf32"
    if apply:
        set_tf32(profile, wanted)
    reason = "products of fp32 numbers round them to 10 bits, as was asked for" if wanted else "fp32 is what it says"
    yield Change(MATMUL, old, TF32_ON if wanted else TF32_OFF, apply, reason)


def _cudnn(profile: DeviceProfile, apply: bool) -> Iterator[Change]:
    import torch

    cudnn: Any = torch.backends.cudnn
    applied = apply and profile.kind == "cuda"
    old = bool(cudnn.benchmark)
    if applied:
        cudnn.benchmark = False
    reason = "it tries out convolutions, of which text encoders have none, anew for each new shape"
    yield Change("cudnn.benchmark", old, False, applied, reason)


def _allocator(profile: DeviceProfile, apply: bool) -> Iterator[Change]:
    import torch

    name = "allocator"
    if profile.kind != "cuda":
        yield Change(name, None, None, False, "a CPU: torch's CUDA allocator is not used")
        return
    bindings: Any = torch._C
    old = _asked(lambda: str(bindings._accelerator_getAllocatorSettings())) or None
    if old is not None:
        yield Change(name, old, old, False, "PYTORCH_ALLOC_CONF has been set already, and is left as it is")
        return
    reason = "less fragmentation by batches of changing size; PYTORCH_ALLOC_CONF does the same from outside"
    if apply:
        try:
            bindings._accelerator_setAllocatorSettings(EXPANDABLE)
        except (RuntimeError, AttributeError) as error:
            yield Change(name, old, EXPANDABLE, False, f"torch refuses: {str(error).splitlines()[0][:160]}")
            return
    yield Change(name, old, EXPANDABLE, apply, reason)


def _asked(question: Callable[[], str]) -> str | None:
    """None where torch does not tell: older builds, or TF32 set by the newer of its two interfaces."""
    try:
        return question()
    except (RuntimeError, AttributeError):
        return None

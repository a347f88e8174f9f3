"""Where and in which precision an encoder computes, and what an encoder is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ..device import BF16_PAYS, DeviceProfile, Precision
from . import TokenIds

if TYPE_CHECKING:
    import torch

    from .packed import Place


class Encoder(Protocol):
    """Batch of token ids -> float32 tensor (n, dimension), pooled, on the device."""

    path: str

    def __call__(self, batch: Sequence[TokenIds]) -> torch.Tensor: ...


@runtime_checkable
class TokenEncoder(Encoder, Protocol):
    """An encoder that shows what it pools."""

    def tokens(self, batch: Sequence[TokenIds]) -> list[torch.Tensor]:
        """Of each text float32 (tokens, hidden) on the device, special tokens included."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """Where and in which precision an encoder computes, and, on a card, how numbers get there and batches start."""

    profile: DeviceProfile
    precision: Precision
    pinned: bool = True
    graphs: str = "auto"

    @property
    def dtype(self) -> torch.dtype:
        import torch

        from .probe import bf16_gain

        if self.precision == "int8":  # of what stands between 8-bit layers
            return torch.bfloat16 if bf16_gain() >= BF16_PAYS else torch.float32
        return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.precision, torch.float32)

    @property
    def place(self) -> Place:
        from .packed import Place

        return Place(self.profile, self.dtype, self.pinned)

"""Where and in which precision an encoder computes, what an encoder is, and token ids to try one with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ...device import BF16_PAYS, DeviceProfile, Precision
from .. import Pause, TokenBatch, TokenIds
from ..folder import Folder

if TYPE_CHECKING:
    import torch

    from .packed import Place


class Encoder(Protocol):
    """Batch of token ids -> float32 tensor (n, dimension), pooled, on the device. Not thread-safe."""

    path: str

    @property
    def pauses(self) -> int:
        """How often a call calls `pause`."""
        ...

    def __call__(self, batch: TokenBatch, pause: Pause | None = None) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Target:
    """Device and precision of an encoder and, on a card, how numbers are copied and whether batches are replayed."""

    profile: DeviceProfile
    precision: Precision
    pinned: bool = True
    graphs: str = "auto"

    @property
    def dtype(self) -> torch.dtype:
        import torch

        from .probe import bf16_gain

        if self.precision == "int8":  # between 8-bit layers
            return torch.bfloat16 if bf16_gain() >= BF16_PAYS else torch.float32
        return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.precision, torch.float32)

    @property
    def place(self) -> Place:
        from .packed import Place

        return Place(self.profile, self.dtype, self.pinned)


# Trial ids stay within the vocabulary: an id outside ends the whole process on a card.
_USUAL_WORDS = 1000  # of a vocabulary whose size config.json does not give
_FIRST, _SPAN = 100, 800  # where most vocabularies have whole words, behind the special ones; enough different ones


def words_of(folder: Folder) -> int:
    """Return the size of the model's vocabulary."""
    return int(folder.config.get("vocab_size") or _USUAL_WORDS)


def trial_tokens(length: int, words: int, *, start: int = 0) -> TokenIds:
    """Return one sequence for a vocabulary of `words`; `start` varies its contents."""
    first = min(_FIRST, words // 2)
    ids = first + (start + 31 * np.arange(length)) % min(_SPAN, words - first)
    return ids.astype(np.int32)


def trial_batch(tokens: int, longest: int, words: int) -> TokenBatch:
    """Return so many tokens in as few sequences as the model's `longest` allows."""
    starts = range(0, tokens, longest)
    return TokenBatch.of(trial_tokens(min(longest, tokens - start), words, start=start) for start in starts)

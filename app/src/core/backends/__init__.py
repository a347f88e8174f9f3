"""What a backend must do: turn texts into token ids and a batch of token ids into vectors. One screen. A backend knows
its model and its device. It never orders, batches, caches, retries or normalises: the engine does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..device import DeviceProfile, Precision
from ..memory import ModelShape

Vectors = NDArray[np.float32]
TokenIds = Sequence[int]


class EngineError(Exception):
    """Root of everything the engine raises on purpose. `retryable`: the same call may succeed later."""

    retryable = False


class ModelNotFound(EngineError):
    """No such packaged model, folder or cached hub model."""


class ModelUnsupported(EngineError):
    """The model is there, but is not one this engine computes (custom code, pickled weights, no tokenizer ...)."""


class WeightsMismatch(EngineError):
    """A file of the model does not have the SHA-256 that was pinned for it."""


class DeviceUnavailable(EngineError):
    """The device or the precision asked for cannot be had on this machine."""


class OutOfMemory(EngineError):
    retryable = True  # once others have let go of memory


class EngineClosed(EngineError):
    """The engine was used after `close`."""


class NonFinite(EngineError):
    """The model gave no finite, non-zero vector for some texts, in fp32 too. `indices` are positions in the call."""

    def __init__(self, indices: Sequence[int]) -> None:
        shown = ", ".join(map(str, indices[:10])) + " ..." * (len(indices) > 10)
        super().__init__(f"the model gives no finite vector for {len(indices)} text(s), at position {shown}")
        self.indices = tuple(indices)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is loaded. `max_tokens` is without the `special_tokens` that each text gets."""

    name: str
    dimension: int
    max_tokens: int
    special_tokens: int
    pooling: str
    weights_sha256: str
    tokenizer_sha256: str
    precision: Precision
    precision_reason: str
    shape: ModelShape
    path: str  # how it is computed: packed, padded, sentence-transformers, onnx-runtime, hashing
    path_reason: str
    matryoshka: Sequence[int] = ()  # shorter lengths that it was trained to be cut to
    variant: str = ""  # family of its vectors, where it is not that of its precision


class Backend(Protocol):
    """One loaded model. Methods may be called from several threads, `forward` never from two at once."""

    info: ModelInfo
    profile: DeviceProfile

    def tokenize(self, texts: Sequence[str]) -> list[TokenIds]:
        """Ids with special tokens, cut to what the model takes."""

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of the whole texts, without special tokens."""

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Where each token of the whole text stands: first character, one after the last."""

    def forward(self, batch: Sequence[TokenIds], *, exact: bool = False) -> Vectors:
        """Pooled vectors (len(batch), dimension), not normalised. `exact` computes in fp32. Raises OutOfMemory."""
        ...

    def free_bytes(self) -> int: ...  # of the device, now; 0 where that means nothing

    def close(self) -> None: ...

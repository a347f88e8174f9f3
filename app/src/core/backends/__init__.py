"""The interface of a backend: one model on one device. Turns texts into token ids, and batches of ids into vectors.

The engine orders, batches, retries and normalises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..device import DeviceProfile, Precision
from ..device import DeviceUnavailable as DeviceUnavailable
from ..device import EngineError as EngineError
from ..memory import ModelShape, TokenCost
from ..tokens import TokenBatch as TokenBatch
from ..tokens import TokenIds as TokenIds
from ..tokens import Vectors as Vectors

InputType = Literal["query", "document"]  # a search text, or a text to be found
Pause = Callable[[], None]
# Waits for the vectors of a batch, float32 (n, dimension), not normalised; rows may be non-finite. Call it once,
# from any thread. Raises the batch's errors (OutOfMemory, DeviceFailed, EngineClosed, the backend's), including those
# reported late.
Running = Callable[[], Vectors]


class ModelNotFound(EngineError):
    """The model is neither packaged, nor a folder, nor a cached hub model."""


class ModelUnsupported(EngineError):
    """The model exists, but this engine cannot compute it (custom code, pickled weights, no tokenizer ...)."""


class WeightsMismatch(EngineError):
    """A file of the model does not have the pinned SHA-256."""


class OutOfMemory(EngineError):
    retryable = True  # others may free memory


class EngineClosed(EngineError):
    """The engine was used after `close`."""


class DeviceFailed(EngineError):
    """The device computes nothing more in this process: a CUDA error other than missing memory. Restart the process."""

    @classmethod
    def after(cls, error: Exception) -> DeviceFailed:
        """Return the error for users; the first line of `error` says what happened."""
        said = str(error).partition("\n")[0].partition(" ; GPU=")[0]  # ONNX Runtime adds host, file and line
        return cls(
            f"the GPU computes nothing more in this process: {said}; restart the process (a sync goes on from what is "
            "stored) and look for Xid in the system's log (dmesg)"
        )


class NonFinite(EngineError):
    """The model has no finite, non-zero vector for some texts, even in fp32. `indices`: positions in the call."""

    def __init__(self, indices: Sequence[int]) -> None:
        shown = ", ".join(map(str, indices[:10])) + " ..." * (len(indices) > 10)
        texts = "1 text" if len(indices) == 1 else f"{len(indices)} texts"
        super().__init__(
            f"the model gives no finite vector for {texts}; change or omit each, by position from 0: {shown}"
        )
        self.indices = tuple(indices)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The loaded model. `max_tokens` excludes the `special_tokens` that each text gets. `languages`: ISO 639-1 codes,
    () if unknown."""

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
    path: str  # packed, padded, sentence-transformers, onnx-runtime, hashing; tokenizer: no weights are loaded
    path_reason: str
    matryoshka: Sequence[int] = ()  # shorter vector lengths that the model is trained for
    variant: str = ""  # family of its vectors, if it differs from the precision's
    languages: tuple[str, ...] = ()
    licence: str = ""
    query_prompt: str = ""  # put before each query; `max_tokens` includes it
    document_prompt: str = ""


class Backend(Protocol):
    """One loaded model. Several threads may call its methods, but only one at a time calls `forward` or `launch`."""

    info: ModelInfo
    profile: DeviceProfile
    ahead: int = 0  # batches to launch before waiting for the oldest; 0: use `forward`
    pauses: int = 0  # how often `forward` calls `pause` within each batch, at least

    def tokenize(self, texts: Sequence[str]) -> TokenBatch:
        """Return ids with special tokens, cut to the model's maximum length."""

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each whole text, without special tokens."""

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Return, for each token of the whole text, its first character and one after its last."""

    def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
        """Return pooled vectors (len(batch), dimension), not normalised. Raises OutOfMemory, DeviceFailed.

        `exact` computes in fp32. `pause` is called at least `pauses` times and may call `forward` itself.
        """

    def launch(self, batch: TokenBatch) -> Running:
        """Start `forward` without waiting. Batches end in the order in which they were launched."""
        raise RuntimeError(f"the backend of {self.info.name} computes at once")

    def free_bytes(self) -> int:
        """Return the device's free memory; 0 if batches cannot exhaust it."""
        return 0

    def used_bytes(self) -> int:
        """Return the device memory that this process holds, mainly weights."""
        return 0

    def token_cost(self) -> TokenCost | None:
        """Measure a batch's memory with two trial batches; return None if the result is unusable."""
        return None

    def close(self) -> None:
        return

"""The torch backend: loads a sentence-transformers folder onto a device and turns token ids into pooled vectors.

Three ways to compute, fastest first: packed (no padding, the architectures of `architectures.py`), padded (any encoder
with mean or CLS pooling), and sentence-transformers' own modules for every other stack. torch and transformers are
imported on loading.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ...device import ELEMENT_BYTES, DeviceError, DeviceProfile, choose_precision, detect
from ...memory import PROBE_TOKENS, TokenCost, measured_cost
from .. import DeviceUnavailable, ModelInfo, OutOfMemory, Pause, Pending, TokenBatch, Vectors
from ..folder import Folder, check_files, display_name, find_folder, read_folder, sha256_of
from ..tokenizing import RustTokenizer, TokenizingBackend
from .compute_thread import on_compute_thread, one_thread
from .encoders import Chosen, load_encoder
from .switches import TF32, tune_convolutions
from .target import Encoder, Target, trial_batch, words_of

if TYPE_CHECKING:
    from .staging import Downloads

# Tokens x hidden size of a batch that one CPU thread computes: 64 tokens of the default model, more than most search
# texts have. For 12 tokens one thread takes 2.5 ms and two take 1.8 ms on two idle cores; while another program uses
# the cores, one takes 4 ms and two up to 0.4 s, which they spend waiting for each other.
ONE_THREAD_UP_TO = 64 * 384


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """What to load and how, as in EngineOptions."""

    model: str
    precision: str = "auto"
    device: str = "auto"
    threads: int | None = None
    weights_sha256: str | None = None
    revision: str | None = None
    packed: bool = True
    overlap: bool = True
    pinned: bool = True
    graphs: str = "auto"
    cudnn_benchmark: bool = False
    clear_cache: bool = False


class TorchBackend(TokenizingBackend):
    """One model on one device; made by `load`."""

    def __init__(self, folder: Folder, options: TorchOptions, target: Target, chosen: Chosen) -> None:
        self.profile = target.profile
        self._folder = folder
        self._options = options
        self._target = target
        self._path_reason = chosen.reason
        self._tokenizer = RustTokenizer.load(folder)
        self._encoder: Encoder | None = chosen.encoder
        self._exact: Encoder | None = chosen.encoder if target.precision == "fp32" else None
        self._downloads: Downloads | None = None  # from a card
        if target.profile.kind == "cuda":
            from .staging import downloads_for

            self._downloads = downloads_for(target.place.device, pinned=target.pinned)
            self.ahead = 1 if options.overlap else 0
        else:
            self.pauses = chosen.encoder.pauses  # on a card `forward` only queues work
        self.info: ModelInfo

    @classmethod
    def load(cls, options: TorchOptions) -> TorchBackend:
        """Raises ModelNotFound, ModelUnsupported, WeightsMismatch, DeviceUnavailable."""
        return on_compute_thread(lambda: cls._load(options))

    @classmethod
    def _load(cls, options: TorchOptions) -> TorchBackend:
        path = find_folder(options.model, options.revision)
        folder = read_folder(path, display_name(options.model, path))
        weights = check_files(folder, options.weights_sha256)
        target, reason = _target(options)
        try:
            with memory_errors_mapped():
                chosen = load_encoder(folder, target, packed=options.packed)
            backend = cls(folder, options, target, chosen)
            backend.info = backend._describe(weights, reason)
        except BaseException:
            TF32.release(target.profile, target.precision)  # there is no engine to be closed
            raise
        return backend

    def _describe(self, weights: str, reason: str) -> ModelInfo:
        special = self._tokenizer.special_tokens
        return ModelInfo(
            name=self._folder.name,
            dimension=self.forward(self._tokenizer.ids([""])).shape[1],
            max_tokens=self._folder.max_length - special,
            special_tokens=special,
            pooling=self._folder.pooling or "own",
            weights_sha256=weights,
            tokenizer_sha256=sha256_of([self._folder.encoder / "tokenizer.json"]),
            precision=self._target.precision,
            precision_reason=reason,
            shape=self._folder.shape,
            path=self._loaded().path,
            path_reason=self._path_reason,
            matryoshka=self._folder.matryoshka,
        )

    def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
        if self._downloads is None:
            return on_compute_thread(lambda: self._computed(batch, exact, pause))
        return self._launched(batch, exact, self._downloads).result()

    def launch(self, batch: TokenBatch) -> Pending:
        """Start a batch on a card.

        The activations of two batches never exist at once: both are computed on one stream, whose memory the allocator
        gives to the next batch as soon as this one is queued.
        """
        assert self._downloads is not None, "a CPU computes at once"
        return self._launched(batch, False, self._downloads)

    def _computed(self, batch: TokenBatch, exact: bool, pause: Pause | None) -> Vectors:
        import torch

        alone = len(batch.ids) * self._folder.shape.hidden <= ONE_THREAD_UP_TO
        with torch.inference_mode(), memory_errors_mapped(), one_thread() if alone else contextlib.nullcontext():
            encoder = self._in_fp32() if exact else self._loaded()
            vectors: Vectors = encoder(batch, pause).float().numpy()
        return vectors

    def _launched(self, batch: TokenBatch, exact: bool, downloads: Downloads) -> Pending:
        import torch

        with torch.inference_mode(), memory_errors_mapped():
            encoder = self._in_fp32() if exact else self._loaded()
            return _Mapped(downloads.fetch(encoder(batch).float()), partial(self._landed, batch))

    def _landed(self, batch: TokenBatch) -> None:
        if self._options.clear_cache:
            give_back_after(self.profile, batch)

    def free_bytes(self) -> int:
        if self.profile.kind == "cpu":
            return 0
        import torch

        torch.cuda.empty_cache()  # so that the driver counts memory that torch has cached as free
        free, _total = torch.cuda.mem_get_info(self.profile.index)
        return int(free)

    def used_bytes(self) -> int:
        if self.profile.kind == "cpu":
            return 0
        import torch

        return int(torch.cuda.memory_allocated(self.profile.index))

    def token_cost(self) -> TokenCost | None:
        """Measure with batches of the longest texts, which take more memory than short ones."""
        if self.profile.kind == "cpu":
            return None
        least = self.info.shape.hidden * ELEMENT_BYTES[self.info.precision]
        try:
            self._peak_bytes(PROBE_TOKENS[0])  # libraries allocate for good on the first batch: do not count that
            return measured_cost(self._peak_bytes, least)
        except OutOfMemory:
            return None

    def _peak_bytes(self, tokens: int) -> int:
        """Return by how many bytes memory grows while so many tokens are computed."""
        import torch

        index = self.profile.index
        batch = trial_batch(tokens, self._folder.max_length, words_of(self._folder))
        torch.cuda.synchronize(index)
        torch.cuda.reset_peak_memory_stats(index)
        before = torch.cuda.memory_allocated(index)
        self.forward(batch)
        return int(torch.cuda.max_memory_allocated(index) - before)

    def close(self) -> None:
        if self._encoder is not None:
            TF32.release(self.profile, self._target.precision)
        self._encoder = self._exact = None
        self._downloads = None  # frees pinned memory; a batch in progress keeps its own
        if self.profile.kind == "cuda":
            import torch

            torch.cuda.empty_cache()

    def _loaded(self) -> Encoder:
        if self._encoder is None:
            raise RuntimeError("the backend is closed")
        return self._encoder

    def _in_fp32(self) -> Encoder:
        """Load when first needed: rows that overflow in half precision are rare."""
        if self._exact is None:
            exact = replace(self._target, precision="fp32", graphs="off")
            self._exact = load_encoder(self._folder, exact, packed=self._options.packed).encoder
        return self._exact


def _target(options: TorchOptions) -> tuple[Target, str]:
    """Set torch's threads, with which the precision of a CPU is measured; return the target and the reason."""
    import torch

    from .probe import bf16_gain

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        profile = detect(options.device)
        precision, reason = choose_precision(profile, options.precision, bf16_gain)
    except DeviceError as error:
        raise DeviceUnavailable(str(error)) from error
    TF32.hold(profile, precision)
    tune_convolutions(profile, options.cudnn_benchmark)
    return Target(profile, precision, options.pinned, options.graphs), reason


LARGE_BATCH = 8192  # tokens of a batch after which `clear_cache` frees memory: smaller ones leave little


def give_back_after(profile: DeviceProfile, batch: TokenBatch) -> bool:
    """After a large batch return torch's cached memory to the driver, for other processes.

    It costs the next batch an allocation by the driver, which waits for the card.
    """
    if profile.kind != "cuda" or batch.tokens < LARGE_BATCH:
        return False
    import torch

    torch.cuda.empty_cache()
    return True


# Messages of the host's allocators; of CUDA outside torch's allocator (pinned memory, a kernel's own, a recording); of
# cuBLAS, if a thread's first product finds no room for its handle.
_NO_MEMORY = ("allocate memory", "not enough memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")


@contextlib.contextmanager
def memory_errors_mapped() -> Iterator[None]:
    """Raise OutOfMemory for every way in which torch, CUDA, cuBLAS and the host report exhausted memory.

    First the failed batch is freed, whose tensors live on in the frames of the traceback, then the GPU's cache.
    """
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)
        torch.cuda.empty_cache()
        raise OutOfMemory("the GPU's memory does not hold this batch") from error
    except MemoryError as error:
        traceback.clear_frames(error.__traceback__)
        raise OutOfMemory("memory does not hold this batch") from error
    except RuntimeError as error:
        if any(words in str(error) for words in _NO_MEMORY):
            traceback.clear_frames(error.__traceback__)
            torch.cuda.empty_cache()  # nothing where no card is in use
            raise OutOfMemory("memory does not hold this batch") from error
        raise


class _Mapped:
    """A batch whose errors are the engine's, also those that the device reports late."""

    def __init__(self, pending: Pending, landed: Callable[[], object]) -> None:
        self._pending = pending
        self._landed = landed

    def result(self) -> Vectors:
        import torch

        with torch.inference_mode(), memory_errors_mapped():
            vectors = self._pending.result()
        self._landed()
        return vectors

"""The torch backend: loads a sentence-transformers folder onto a device and turns token ids into pooled vectors.

Three ways to compute, best first: packed (no padding, CPU, the architectures of `architectures.py`), padded (any
encoder with mean or CLS pooling), and sentence-transformers' own modules for every other stack. torch and transformers
are imported on loading.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..device import ELEMENT_BYTES, DeviceError, DeviceProfile, choose_precision, detect
from ..memory import PROBE_TOKENS, TokenCost, measured_cost
from ..switches import TF32, tune_convolutions
from . import DeviceUnavailable, ModelInfo, ModelUnsupported, OutOfMemory, TokenIds, Vectors
from .compute_thread import on_compute_thread, one_thread
from .encoders import Chosen, load_encoder
from .folder import Folder, check_files, display_name, find_folder, read_folder, sha256_of
from .overlapping import Pending
from .pausing import Interruptible
from .target import Encoder, Target, TokenEncoder
from .tokenizing import RustTokenizer, Tokenizing
from .trial_tokens import trial_batch, words_of

if TYPE_CHECKING:
    from .staging import Downloads

# Tokens x hidden size of a batch that one CPU thread computes: 64 tokens of the default model, more than most search
# texts have. For 12 tokens one thread takes 2.5 ms and two take 1.8 ms on two idle cores; while another program uses
# the cores, one takes 4 ms and two up to 0.4 s, which they spend waiting for each other.
ONE_THREAD_UP_TO = 64 * 384


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """What to load and how. `weights_sha256`: expected sum of the weights, for models that are not packaged.

    `threads` sets torch's number of CPU threads for the whole process; None leaves it. `packed` False forces the
    padded path, for comparison. The others as in EngineOptions.
    """

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


class TorchBackend(Tokenizing):
    """One model on one device; made by `load`."""

    def __init__(self, folder: Folder, options: TorchOptions, target: Target, chosen: Chosen) -> None:
        self.profile = target.profile
        self._folder = folder
        self._options = options
        self._target = target
        self._path_reason = chosen.reason
        self._tokenizer = RustTokenizer.load(folder)
        self._encoder: Encoder | None = chosen.encoder
        self._plain: Encoder | None = None
        self._exact: Encoder | None = chosen.encoder if target.precision == "fp32" else None
        self._downloads = _downloads(target)
        self.ahead = 1 if target.profile.kind == "cuda" and options.overlap else 0
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
            dimension=self.forward([self._tokenizer.ids([""])[0]]).shape[1],
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

    def forward(self, batch: Sequence[TokenIds], *, exact: bool = False) -> Vectors:
        if self._downloads is None:
            return on_compute_thread(lambda: self._forward(batch, exact))
        return self._launched(batch, exact, self._downloads).result()

    def begin(self, batch: Sequence[TokenIds]) -> Pending:
        """On a card. Activations of two batches are never there at once: both are computed on one stream, whose memory
        the allocator gives to the next batch as soon as this one is queued."""
        assert self._downloads is not None, "a CPU computes at once"
        return self._launched(batch, False, self._downloads)

    def _forward(self, batch: Sequence[TokenIds], exact: bool) -> Vectors:
        import torch

        alone = sum(map(len, batch)) * self._folder.shape.hidden <= ONE_THREAD_UP_TO
        with torch.inference_mode(), memory_errors_mapped(), one_thread() if alone else contextlib.nullcontext():
            encoder = self._in_fp32() if exact else self._loaded()
            vectors: Vectors = encoder(batch).float().numpy()
        return vectors

    def token_vectors(self, batch: Sequence[TokenIds]) -> list[Vectors]:
        """Before pooling, of every token but the special ones (all where there are no others). Raises ModelUnsupported,
        OutOfMemory."""
        compute = partial(self._token_vectors, batch)
        return on_compute_thread(compute) if self._downloads is None else compute()

    def _token_vectors(self, batch: Sequence[TokenIds]) -> list[Vectors]:
        import torch

        with torch.inference_mode(), memory_errors_mapped():
            rows = self._of_tokens().tokens(batch)
            together: Vectors = torch.cat(rows).cpu().numpy()
        special = self._tokenizer.ids([""])[0]
        ends = np.cumsum([len(tokens) for tokens in batch])
        found = []
        for tokens, vectors in zip(batch, np.split(together, ends[:-1]), strict=True):
            words = ~np.isin(tokens, special)
            found.append(vectors[words] if words.any() else vectors)
        return found

    def _of_tokens(self) -> TokenEncoder:
        """What is played from recordings has pooled vectors only: then a second encoder, loaded when first needed."""
        encoder = self._loaded() if self._plain is None else self._plain
        if not isinstance(encoder, TokenEncoder):
            plain = replace(self._target, graphs="off")
            encoder = self._plain = load_encoder(self._folder, plain, packed=self._options.packed).encoder
        if not isinstance(encoder, TokenEncoder):
            raise ModelUnsupported(
                f"model {self._folder.name!r} is computed by {encoder.path}, which gives one vector a text and none of"
                " its tokens"
            )
        return encoder

    def _launched(self, batch: Sequence[TokenIds], exact: bool, downloads: Downloads) -> Pending:
        import torch

        with torch.inference_mode(), memory_errors_mapped():
            encoder = self._in_fp32() if exact else self._loaded()
            return _Mapped(downloads.fetch(encoder(batch).float()), partial(self._landed, batch))

    def _landed(self, batch: Sequence[TokenIds]) -> None:
        if self._options.clear_cache:
            give_back_after(self.profile, batch)

    @property
    def pauses(self) -> int:
        encoder = self._interruptible()
        return 0 if encoder is None else encoder.pauses

    @property
    def pause(self) -> Callable[[], None] | None:
        encoder = self._interruptible()
        return None if encoder is None else encoder.pause

    @pause.setter
    def pause(self, call: Callable[[], None] | None) -> None:
        encoder = self._interruptible()
        if encoder is not None:
            encoder.pause = call

    def _interruptible(self) -> Interruptible | None:
        """Not on a GPU, where calls only queue work and return."""
        encoder = self._encoder
        return encoder if self.profile.kind == "cpu" and isinstance(encoder, Interruptible) else None

    def free_bytes(self) -> int:
        if self.profile.kind == "cpu":
            return 0
        import torch

        torch.cuda.empty_cache()  # what torch keeps for later is free, too, and the driver does not know
        free, _total = torch.cuda.mem_get_info(self.profile.index)
        return int(free)

    def used_bytes(self) -> int:
        if self.profile.kind == "cpu":
            return 0
        import torch

        return int(torch.cuda.memory_allocated(self.profile.index))

    def token_cost(self) -> TokenCost | None:
        """By two batches of the longest texts: more than those of short ones take."""
        if self.profile.kind == "cpu":
            return None
        least = self.info.shape.hidden * ELEMENT_BYTES[self.info.precision]
        try:
            self._peak_bytes(PROBE_TOKENS[0])  # what libraries take for good on the first batch is no batch's
            return measured_cost(self._peak_bytes, least)
        except OutOfMemory:
            return None

    def _peak_bytes(self, tokens: int) -> int:
        """By how much memory grows while so many tokens are computed."""
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
        self._encoder = self._exact = self._plain = None
        self._downloads = None  # pinned memory, and what nobody asked for; a batch on its way has its own
        if self.profile.kind == "cuda":
            import torch

            torch.cuda.empty_cache()

    def _loaded(self) -> Encoder:
        if self._encoder is None:
            raise RuntimeError("the backend is closed")
        return self._encoder

    def _in_fp32(self) -> Encoder:
        """Loaded when first needed: rows that overflow in half precision are rare."""
        if self._exact is None:
            exact = replace(self._target, precision="fp32", graphs="off")
            self._exact = load_encoder(self._folder, exact, packed=self._options.packed).encoder
        return self._exact


def _target(options: TorchOptions) -> tuple[Target, str]:
    """Sets torch's threads first: the precision of a CPU is measured."""
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


LARGE_BATCH = 8192
"""Tokens of a batch after which `clear_cache` gives memory back: smaller ones leave little behind."""


def give_back_after(profile: DeviceProfile, batch: Sequence[TokenIds]) -> bool:
    """After a large batch, what torch keeps of the card's memory for the next one goes back to the driver, so that
    other processes can have it. The next batch asks the driver anew, which waits for the card."""
    if profile.kind != "cuda" or sum(map(len, batch)) < LARGE_BATCH:
        return False
    import torch

    torch.cuda.empty_cache()
    return True


_NO_MEMORY = ("allocate memory", "not enough memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""Of the host's allocators; of what CUDA takes beside torch's allocator (pinned memory, a kernel's own, a recording);
of cuBLAS, when a thread's first product finds no room for its handle."""


@contextlib.contextmanager
def memory_errors_mapped() -> Iterator[None]:
    """torch reports exhausted memory in several ways: its allocator's own error, and those of CUDA, cuBLAS and the host
    in words. One error leaves here, with the GPU's cache given back. The batch that failed is let go first: its tensors
    live on in the frames of the traceback."""
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


def _downloads(target: Target) -> Downloads | None:
    if target.profile.kind == "cpu":
        return None
    from .staging import downloads_for

    return downloads_for(target.place.device, pinned=target.pinned)


class _Mapped:
    """A batch whose errors, also those that the device tells late, are the engine's."""

    def __init__(self, pending: Pending, landed: Callable[[], object]) -> None:
        self._pending = pending
        self._landed = landed

    def result(self) -> Vectors:
        import torch

        with torch.inference_mode(), memory_errors_mapped():
            vectors = self._pending.result()
        self._landed()
        return vectors

"""The torch backend: loads a sentence-transformers folder onto a device and turns token ids into pooled vectors.

`encoders.py` chooses how to compute. Loading a model imports torch and transformers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...device import ELEMENT_BYTES, DeviceProfile, choose_precision, detect
from ...memory import PROBE_TOKENS, MemoryLimits, TokenCost, measured_cost
from .. import OutOfMemory, Pause, Running, TokenBatch, Vectors
from ..folder import Folder, check_files, display_name, find_folder, read_folder
from ..tokenizing import RustTokenizer, TokenizingBackend, model_info
from .encoders import Encoder, Target, load_encoder, load_exact, trial_batch, words_of
from .process import (
    TF32,
    Result,
    device_errors_mapped,
    limited_memory,
    never_free,
    on_compute_thread,
    one_thread,
    reserved_bytes,
    still_works,
)

if TYPE_CHECKING:
    from .int8 import Ranges
    from .staging import Downloads

# Largest tokens x hidden size that one CPU thread computes: 64 tokens of the default model, more than most search
# texts. For 12 tokens one thread takes 2.5 ms and two take 1.8 ms on two idle cores; on busy cores one takes 4 ms and
# two up to 0.4 s, because they wait for each other.
ONE_THREAD_UP_TO = 64 * 384
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Ranges of a model's activations for int8 on a CPU, their digest, and what the accuracy gate found."""

    ranges: Ranges
    digest: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What to load and how. `model`: a packaged name, a folder, a cached hub id, or, for `load_engine`, hash:N.

    `precision`: auto fp32 tf32 fp16 bf16; for `load_engine` also int8, float and int8-DIGEST, which names a
    calibration. `device`: auto cpu cuda cuda:N; for `load_engine` also several of them, or "all" cards.
    `weights_sha256` and `revision` pin a model that is not packaged. Prompts that are not None replace the model's own.
    `threads`: torch's CPU threads in each process; None leaves the number as is. `packed` False forces padded batches,
    for comparison. `graphs`: on a card, replay small batches if measured faster. `experimental_kernels`: on a card, try
    fused kernels, which no card has run yet; `path_reason` names those that were taken. `tokenizer_workers`:
    processes that tokenise large calls; None: none on a CPU, on a card up to four. `engines`: how many engines share
    this machine's processors; `load_engine` sets it. `calibration`: set by CpuCalibration.
    """

    model: str = "all-MiniLM-L6-v2"
    precision: str = "auto"
    device: str | Sequence[str] = "auto"
    threads: int | None = None
    weights_sha256: str | None = None
    revision: str | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None
    packed: bool = True
    graphs: bool = True
    experimental_kernels: bool = False
    cache: Path | None = None  # see find_folder
    memory_fraction: float = 0.8  # of the card's memory, for this process; that of the last load counts
    reserve_mb: int = 512  # of it, left free
    tokenizer_workers: int | None = None
    engines: int = 1
    calibration: Calibration | None = None  # computes in int8


class TorchBackend(TokenizingBackend):
    """One model on one device; made by `load`."""

    def __init__(self, options: EngineOptions) -> None:
        folder, weights = find_model(options)
        self._folder = folder
        target, reason = _target(options)
        self.profile = target.profile
        self._options = options
        self._target = target
        self._exact: Encoder | None = None
        self._exact_on_cpu = False
        self._downloads: Downloads | None = None  # from a card
        try:
            limits = MemoryLimits(options.memory_fraction, options.reserve_mb << 20)
            with device_errors_mapped(target.profile.index):
                self._memory = limited_memory(target.profile, limits)
                self._before = reserved_bytes(target.profile)  # before this model
                encoder, path_reason = load_encoder(folder, target, packed=options.packed)
            self._encoder: Encoder | None = encoder
            self._tokenizer = RustTokenizer.load(folder)
            if target.profile.kind == "cuda":
                import torch

                from .staging import CudaCard, Downloads

                self._tokenizer.check_ids(folder)
                self._downloads = Downloads(CudaCard(torch.device(target.profile.torch_name)))
                self.ahead = 1
            else:
                self.pauses = encoder.pauses  # on a card `forward` only queues work
            dimension = self.forward(self._tokenizer.ids([""])).shape[1]
            self.info = replace(
                model_info(folder, self._tokenizer, weights, dimension),
                precision=target.precision,
                precision_reason=reason,
                path=encoder.path,
                path_reason=path_reason,
                variant=f"int8-{options.calibration.digest[:12]}" if options.calibration else "",
            )
        except BaseException:
            TF32.release(target.profile, target.precision)  # no engine exists that `close` could be called on
            raise

    @classmethod
    def load(cls, options: EngineOptions) -> TorchBackend:
        """Load a model. Raises ModelNotFound, ModelUnsupported, WeightsMismatch, DeviceUnavailable."""
        return computing(options, lambda: cls(options))

    def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
        if self._downloads is None or (exact and self._exact_on_cpu):
            return on_compute_thread(lambda: self._computed(batch, exact, pause), _compute_thread(self.profile))
        try:
            return self._launched(batch, exact, self._downloads)()
        except OutOfMemory:
            if not exact or self._target.precision == "fp32" or (self._exact is not None and len(batch) > 1):
                raise  # a smaller batch may fit
        _log.warning("%s: the card has no room for rows in fp32; the CPU computes them from now on", self.info.name)
        self._exact, self._exact_on_cpu = None, True
        return self.forward(batch, exact=True)

    def launch(self, batch: TokenBatch) -> Running:
        """Start a batch on a card. All batches compute on one stream, so they reuse the same memory for activations."""
        assert self._downloads is not None, "a CPU computes at once"
        return self._launched(batch, False, self._downloads)

    def _computed(self, batch: TokenBatch, exact: bool, pause: Pause | None) -> Vectors:
        import torch

        alone = len(batch.ids) * self._folder.shape.hidden <= ONE_THREAD_UP_TO
        with torch.inference_mode(), device_errors_mapped(), one_thread() if alone else contextlib.nullcontext():
            encoder = self._encoder_for(exact)
            vectors: Vectors = encoder(batch, pause).float().numpy()
        return vectors

    def _launched(self, batch: TokenBatch, exact: bool, downloads: Downloads) -> Running:
        import torch

        with torch.inference_mode(), device_errors_mapped(self.profile.index):
            encoder = self._encoder_for(exact)
            return downloads.fetch(encoder(batch).float())

    def used_bytes(self) -> int:
        return max(0, reserved_bytes(self.profile) - self._before)

    def token_cost(self) -> TokenCost | None:
        """Measure with batches of the longest texts, which need the most memory per token."""
        if self.profile.kind == "cpu":
            return None
        least = self.info.shape.hidden * ELEMENT_BYTES[self.info.precision]
        try:
            # Trial batches must exceed those in CUDA graphs, which allocate nothing when they are replayed.
            times = 3 if max(getattr(self._encoder, "rungs", ()), default=0) >= PROBE_TOKENS[0] else 1
            self._peak_bytes(times * PROBE_TOKENS[0])  # not counted: what libraries allocate once, on the first batch
            return measured_cost(self._peak_bytes, least, times)
        except OutOfMemory:
            return None

    def _peak_bytes(self, tokens: int) -> int:
        """Return the peak growth of device memory, in bytes, while computing `tokens` tokens."""
        import torch

        index = self.profile.index
        batch = trial_batch(tokens, self._folder.max_length, words_of(self._folder))
        torch.cuda.synchronize(index)
        torch.cuda.reset_peak_memory_stats(index)
        before = torch.cuda.memory_allocated(index)
        self.forward(batch)
        return int(torch.cuda.max_memory_allocated(index) - before)

    def close(self) -> None:
        super().close()
        if self._encoder is not None:
            TF32.release(self.profile, self._target.precision)
        if self.profile.kind == "cuda" and not still_works(self.profile.index):
            never_free(self._encoder, self._exact, self._downloads)
        self._encoder = self._exact = None
        self._downloads = None  # frees pinned memory; a batch in progress keeps its own
        if self.profile.kind == "cuda":
            import torch

            with contextlib.suppress(RuntimeError):  # of a card that failed; the process ends soon
                torch.cuda.empty_cache()

    def _encoder_for(self, exact: bool) -> Encoder:
        """Return the encoder. Loads the fp32 one on first use: rows that overflow in half precision are rare."""
        if self._encoder is None:
            raise RuntimeError("the backend is closed")
        if not exact or self._target.precision == "fp32":
            return self._encoder
        if self._exact is None:
            profile = detect("cpu") if self._exact_on_cpu else self.profile
            before = reserved_bytes(profile)
            self._exact = load_exact(self._folder, replace(self._target, profile=profile), self._encoder)
            self._memory.hold(self._exact, max(0, reserved_bytes(profile) - before))
        return self._exact


def find_model(options: EngineOptions) -> tuple[Folder, str]:
    """Return the model's folder and the SHA-256 of its weights. Raises ModelNotFound, ModelUnsupported,
    WeightsMismatch."""
    path = find_folder(options.model, options.revision, options.cache)
    folder = read_folder(path, display_name(options.model, path), options.query_prompt, options.document_prompt)
    return folder, check_files(folder, options.weights_sha256)


def computing(options: EngineOptions, work: Callable[[], Result]) -> Result:
    """Run `work` on the compute thread of the device, with the threads of the options."""

    def run() -> Result:
        if options.threads is not None:
            import torch

            torch.set_num_threads(options.threads)
        return work()

    return on_compute_thread(run, _compute_thread(detect(options.device)))


def _compute_thread(profile: DeviceProfile) -> int:
    return profile.index if profile.kind == "cpu" else 0


def _target(options: EngineOptions) -> tuple[Target, str]:
    """Choose device and precision; return the target and the reason."""
    from .linears import bf16_gain

    profile = detect(options.device)
    if options.calibration is not None:
        return Target(profile, "int8", ranges=options.calibration.ranges), options.calibration.reason
    precision, reason = choose_precision(profile, options.precision, bf16_gain)
    TF32.hold(profile, precision)
    return Target(profile, precision, options.graphs, options.experimental_kernels), reason

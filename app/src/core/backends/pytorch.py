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
from typing import TYPE_CHECKING, Any, Protocol

from ..device import BF16_PAYS, ELEMENT_BYTES, DeviceError, DeviceProfile, Precision, choose_precision, detect
from ..memory import PROBE_TOKENS, TokenCost, measured_cost
from ..ranges import ranged
from ..switches import TF32, tune_convolutions
from . import DeviceUnavailable, ModelInfo, ModelUnsupported, OutOfMemory, TokenIds, Vectors
from .compute_thread import on_compute_thread
from .folder import PACKAGED, Folder, check_files, display_name, find_folder, read_folder, sha256_of
from .overlapping import Pending
from .pausing import Interruptible
from .rectangles import rectangle, width_of
from .tokenizing import RustTokenizer

if TYPE_CHECKING:
    import torch

    from .packed import PackedEncoder, Place
    from .staging import Downloads, Uploads

AGREEMENT = 0.99999
"""Least cosine between the packed and the padded path, both in fp32, for a model that is not packaged."""
ROUGH_AGREEMENT = 0.99
"""Least cosine between the packed path in a shorter precision and the padded one in fp32: less is no rounding."""


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


class Encoder(Protocol):
    """Batch of token ids -> float32 tensor (n, dimension), pooled, on the device."""

    path: str

    def __call__(self, batch: Sequence[TokenIds]) -> torch.Tensor: ...


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


class TorchBackend:
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

    @ranged("tokenise")
    def tokenize(self, texts: Sequence[str]) -> list[TokenIds]:
        return self._tokenizer.ids(texts)

    def count(self, texts: Sequence[str]) -> list[int]:
        return self._tokenizer.count(texts)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        return self._tokenizer.offsets(text)

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

        with torch.inference_mode(), memory_errors_mapped():
            encoder = self._in_fp32() if exact else self._loaded()
            vectors: Vectors = encoder(batch).float().numpy()
        return vectors

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

        index, longest = self.profile.index, self._folder.max_length
        words = int(self._folder.config.get("vocab_size") or 1000)
        batch = [_sequence(min(longest, tokens - start), words) for start in range(0, tokens, longest)]
        torch.cuda.synchronize(index)
        torch.cuda.reset_peak_memory_stats(index)
        before = torch.cuda.memory_allocated(index)
        self.forward(batch)
        return int(torch.cuda.max_memory_allocated(index) - before)

    def close(self) -> None:
        if self._encoder is not None:
            TF32.release(self.profile, self._target.precision)
        self._encoder = self._exact = None
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


@contextlib.contextmanager
def memory_errors_mapped() -> Iterator[None]:
    """torch reports exhausted memory in three ways; one error leaves here, with the GPU's cache given back. The batch
    that failed is let go first: its tensors live on in the frames of the traceback."""
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
        if "allocate memory" in str(error) or "not enough memory" in str(error):
            traceback.clear_frames(error.__traceback__)
            raise OutOfMemory("memory does not hold this batch") from error
        raise


def _downloads(target: Target) -> Downloads | None:
    if target.profile.kind == "cpu":
        return None
    from .staging import downloads_for

    return downloads_for(target.place.device, pinned=target.pinned)


def _uploads(target: Target) -> Uploads | None:
    if target.profile.kind == "cpu":
        return None
    from .staging import uploads_for

    return uploads_for(target.place.device, pinned=target.pinned)


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


def _sequence(length: int, words: int) -> TokenIds:
    """Any tokens of a vocabulary of so many: on a card one that is not there ends the whole process."""
    first = min(100, words // 2)
    return [first + place % min(800, words - first) for place in range(length)]


# ------------------------------------------------------------------------------------------------------ ways to compute


@dataclass(frozen=True, slots=True)
class Chosen:
    """An encoder, and why it is computed this way."""

    encoder: Encoder
    reason: str


def load_encoder(folder: Folder, target: Target, *, packed: bool = True) -> Chosen:
    """The best way to compute this model on this device that is known to give the right vectors."""
    from .architectures import refusal
    from .packed import PackedEncoder
    from .quantising import load_int8

    if target.precision == "int8":
        found = Chosen(*load_int8(folder, target.profile, target.dtype))
        if folder.name not in PACKAGED:
            _check_reader(folder, Target(target.profile, "fp32"))
        return found
    why_not = refusal(folder) if packed else "padding was asked for"
    if why_not is not None:
        return Chosen(load_rectangular(folder, target), why_not)
    encoder = PackedEncoder.load(folder, target.place)
    if target.profile.kind == "cpu" and folder.name in PACKAGED:
        return Chosen(encoder, "known to give the vectors of transformers' own modules")
    chosen = _compared(folder, target, encoder)
    if target.profile.kind == "cpu" or chosen.encoder is not encoder:
        return chosen
    return _on_card(target, encoder, chosen.reason)


def _on_card(target: Target, encoder: PackedEncoder, reason: str) -> Chosen:
    """With CUDA graphs where they pay: they need an attention that is recorded once for every length."""
    import torch

    from .graphs import CudaRecorder, with_graphs
    from .staging import uploads_for

    reasons = f"{reason}; {encoder.attention.reason}"
    if target.graphs == "off":
        return Chosen(encoder, f"{reasons}; CUDA graphs are switched off")
    if not encoder.attention.attention.any_layout:
        return Chosen(encoder, f"{reasons}; no CUDA graphs with that")
    device = target.place.device
    best, why = with_graphs(
        encoder,
        CudaRecorder(device),
        uploads_for(device, pinned=target.pinned),
        lambda: torch.cuda.synchronize(device),
        always=target.graphs == "on",
    )
    return Chosen(best, f"{reasons}; {why}")


def _compared(folder: Folder, target: Target, encoder: Encoder) -> Chosen:
    """Whether the architecture was understood is seen in fp32, where rounding hides nothing; whether a shorter
    precision works, by how near its vectors are to those."""
    exact = replace(target, precision="fp32")
    reference = load_rectangular(folder, exact)
    structure = encoder if target.precision == "fp32" else _plain_packed(folder, exact)
    least, rough = least_cosine(folder, structure, reference), least_cosine(folder, encoder, reference)
    if least >= AGREEMENT and rough >= ROUGH_AGREEMENT:
        return Chosen(encoder, f"a self-test gave the vectors of transformers' own modules (least cosine {least:.7f})")
    worst = min(least, rough)
    reason = f"packed, a self-test gave other vectors than transformers' own modules (least cosine {worst:.5f})"
    return Chosen(reference if target.precision == "fp32" else load_rectangular(folder, target), reason)


def _check_reader(folder: Folder, exact: Target) -> None:
    """INT8 is compared with the packed path in fp32; is that one right? Raises ModelUnsupported."""
    least = least_cosine(folder, _plain_packed(folder, exact), load_rectangular(folder, exact))
    if not least >= AGREEMENT:
        raise ModelUnsupported(
            f"model {folder.name!r} cannot be computed in int8: packed, a self-test gave other vectors than"
            f" transformers' own modules (least cosine {least:.5f}); use precision auto"
        )


def _plain_packed(folder: Folder, target: Target) -> Encoder:
    from .linears import PlainLinears
    from .packed import PackedEncoder

    return PackedEncoder.load(folder, target.place, PlainLinears())


def load_rectangular(folder: Folder, target: Target) -> Encoder:
    return PaddedEncoder(folder, target) if folder.pooling else StackEncoder(folder, target)


def least_cosine(folder: Folder, encoder: Encoder, reference: Encoder) -> float:
    """Between the vectors of both for sequences of equal and of different lengths, as long as the model takes them up
    to 300: beyond the window of every layer that has one."""
    import torch

    tokens = int(folder.config.get("vocab_size") or 1000)
    lengths = [min(length, folder.max_length) for length in (300, 150, 60, 33, 33, 16, 7, 7, 3)]
    first = min(100, tokens // 2)
    batch = [
        [first + (17 * row + 31 * column) % min(800, tokens - first) for column in range(length)]
        for row, length in enumerate(lengths)
    ]
    with torch.inference_mode():
        cosines = torch.nn.functional.cosine_similarity(encoder(batch).double(), reference(batch).double())
    return float(cosines.nan_to_num(nan=-1.0).min())


class _Rectangular:
    """Common to encoders that want every text of a batch at one length."""

    def __init__(self, folder: Folder, target: Target) -> None:
        self._multiple = target.profile.padding_multiple(target.precision)
        self._longest = folder.max_length
        self._pad_id = int(folder.config.get("pad_token_id") or 0)
        self._uploads = _uploads(target)

    @ranged("copy")
    def _inputs(self, batch: Sequence[TokenIds]) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        width = width_of(batch, self._multiple, self._longest)
        ids, mask = map(torch.from_numpy, rectangle(batch, width=width, pad_id=self._pad_id))
        return (ids, mask) if self._uploads is None else self._sent(self._uploads, ids, mask)

    def _sent(self, uploads: Uploads, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """In one copy of half the size; int64 on the card."""
        room = uploads.room(2 * ids.numel()).reshape(2, *ids.shape)
        room[0], room[1] = ids.numpy(), mask.numpy()
        there = uploads.send().view(2, *ids.shape).long()
        return there[0], there[1]


class PaddedEncoder(_Rectangular):
    """transformers' own model; pooling in fp32."""

    path = "padded"

    def __init__(self, folder: Folder, target: Target) -> None:
        super().__init__(folder, target)
        self._mean = folder.pooling == "mean"
        self._model = _load_transformer(folder, target)

    def __call__(self, batch: Sequence[TokenIds]) -> torch.Tensor:
        return self._computed(*self._inputs(batch))

    @ranged("forward")
    def _computed(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self._pooled(self._model(input_ids=ids, attention_mask=mask).last_hidden_state.float(), mask)

    @ranged("pool")
    def _pooled(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not self._mean:
            return hidden[:, 0]
        weights = mask.unsqueeze(-1).float()
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def _load_transformer(folder: Folder, target: Target) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModel

    with quiet_transformers():
        try:
            model, found = AutoModel.from_pretrained(
                folder.encoder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=target.dtype,
                output_loading_info=True,
            )
        except (ValueError, KeyError, OSError, SafetensorError) as error:
            raise ModelUnsupported(f"model {folder.name!r}: transformers cannot load it: {error}") from error
    missing = sorted(name for name in found["missing_keys"] if not name.startswith("pooler."))
    if missing:  # transformers would compute with random numbers in their place
        raise ModelUnsupported(f"model {folder.name!r} lacks the tensor {missing[0]!r}")
    return model.to(target.profile.torch_name).eval()


class StackEncoder(_Rectangular):
    """sentence-transformers' modules, one after the other, for stacks with more than mean or CLS pooling."""

    path = "sentence-transformers"

    def __init__(self, folder: Folder, target: Target) -> None:
        super().__init__(folder, target)
        from sentence_transformers import SentenceTransformer

        with quiet_transformers():
            self._model = SentenceTransformer(
                str(folder.path),
                device=target.profile.torch_name,
                trust_remote_code=False,
                local_files_only=True,
                model_kwargs={"use_safetensors": True, "dtype": target.dtype},
            ).eval()

    def __call__(self, batch: Sequence[TokenIds]) -> torch.Tensor:
        return self._computed(*self._inputs(batch))

    @ranged("forward")
    def _computed(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self._model({"input_ids": ids, "attention_mask": mask})["sentence_embedding"]
        return vectors.float()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bar of theirs in the middle of ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]

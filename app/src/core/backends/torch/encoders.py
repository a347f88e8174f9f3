"""Choose a model's encoder: the fastest with correct vectors on the device. It is packed (`packed.py`), padded with
mean or CLS pooling, or runs sentence-transformers' modules for every other stack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ...device import DeviceProfile, Precision
from ...tokens import plan_batches, rectangle, width_of
from .. import ModelUnsupported, Pause, TokenBatch, TokenIds
from ..folder import Folder
from ..packaged import PACKAGED
from .process import device_clock

if TYPE_CHECKING:
    import torch

    from .graphs import GraphedEncoder
    from .int8 import Ranges
    from .packed import PackedEncoder
    from .universal import UniversalEncoder

# Batch of token ids -> float32 tensor (n, dimension), pooled, on the device. Calls `pause` `pauses` times. Not
# thread-safe.
Encoder: TypeAlias = "PackedEncoder | GraphedEncoder | PaddedEncoder | UniversalEncoder"

# Least cosine between the packed and the padded path, both in fp32, for a model that is not packaged.
AGREEMENT = 0.99999
# Least cosine between the packed path in a shorter precision and the padded one in fp32; rounding alone stays above it.
ROUGH_AGREEMENT = 0.99


@dataclass(frozen=True, slots=True)
class Target:
    """Device and precision of an encoder; on a card `graphs` replays small batches if that is faster, and `fused` tries
    the kernels of `kernels.py`."""

    profile: DeviceProfile
    precision: Precision
    graphs: bool = True
    fused: bool = False
    ranges: Ranges | None = None  # of a calibration, for int8

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.precision, torch.float32)


# ---------------------------------------------------------------------------------------------- choice of the encoder


def load_encoder(folder: Folder, target: Target, *, packed: bool = True) -> tuple[Encoder, str]:
    """Return the fastest encoder with correct vectors on this device, and the reason."""
    from .architectures import refusal

    if target.ranges is not None:
        from .int8 import load_int8

        return load_int8(folder, target.profile, target.ranges), "calibrated; 8-bit products pass the self-test"
    if folder.universal:
        from .universal import UniversalEncoder

        return UniversalEncoder(folder, target.profile, target.dtype), "the only path of this architecture"
    why_not = refusal(folder) if packed else "padding was requested"
    if why_not is not None:
        return PaddedEncoder(folder, target), why_not
    encoder = _packed(folder, target)
    if target.profile.kind == "cpu" and folder.name in PACKAGED:
        return encoder, "verified to match Transformers"
    # Compare in fp32 too, where rounding cannot hide a wrong architecture.
    exact = replace(target, precision="fp32")
    reference = PaddedEncoder(folder, exact)
    structure = encoder if target.precision == "fp32" else _packed(folder, exact, prepack=False)
    least, rough = least_cosine(folder, structure, reference), least_cosine(folder, encoder, reference)
    if least < AGREEMENT or rough < ROUGH_AGREEMENT:
        reason = f"self-test: packed vectors differ from those of Transformers (least cosine {min(least, rough):.5f})"
        return reference if target.precision == "fp32" else PaddedEncoder(folder, target), reason
    reason = f"self-test: matches Transformers (least cosine {least:.7f})"
    if target.profile.kind == "cpu":
        return encoder, reason
    from .packed import runs_of_equal_length

    reason = "; ".join(filter(None, (reason, encoder.attention_reason, encoder.kernels_reason)))
    if encoder.attention is runs_of_equal_length:  # it needs the lengths, which a graph does not fix
        padded = reference if target.precision == "fp32" else PaddedEncoder(folder, target)
        faster, why = _faster(folder, target, encoder, padded)
        return faster, f"{reason}; {why}"
    del reference, structure  # recordings get the memory of their fp32 weights
    graphed, why = _graphed(folder, target, encoder)
    return graphed, f"{reason}; {why}"


def _faster(
    folder: Folder, target: Target, packed: PackedEncoder, padded: PaddedEncoder
) -> tuple[PackedEncoder | PaddedEncoder, str]:
    """Time texts of many lengths on a card; return the faster encoder, and both times."""
    import torch

    from .linears import rounds_of

    words, lengths = words_of(folder), np.linspace(8, folder.max_length, 32, dtype=int).tolist()
    texts = TokenBatch.of(trial_tokens(length, words) for length in lengths)
    planned = plan_batches(lengths, texts.tokens, target.profile.padding_multiple(target.precision))
    rectangles = [texts.select(places) for places in planned]

    def compute() -> None:
        for batch in rectangles:
            padded(batch)

    with torch.inference_mode():
        rounds = rounds_of((partial(packed, texts), compute), device_clock(target.profile))
    one, other = map(min, zip(*rounds, strict=True))
    shown = f"{texts.tokens} tokens take {1e3 * one:.1f} ms packed, {1e3 * other:.1f} ms padded"
    return (packed if one < other else padded), f"{shown}; no CUDA graphs with either"


def _graphed(folder: Folder, target: Target, encoder: PackedEncoder) -> tuple[PackedEncoder | GraphedEncoder, str]:
    """Return the encoder with CUDA graphs if they are switched on and faster, and the reason."""
    import torch

    from .graphs import FAST_LADDER, LADDER, GraphedEncoder, cuda_recorder, with_graphs
    from .staging import uploads_for

    if not target.graphs:
        return encoder, "CUDA graphs are switched off"
    device = torch.device(target.profile.torch_name)
    graphed = GraphedEncoder(encoder, cuda_recorder(device), uploads_for(device))
    trial = partial(trial_batch, longest=encoder.longest, words=words_of(folder))
    ladder = FAST_LADDER if (target.profile.capability or (0, 0)) >= (9, 0) else LADDER
    return with_graphs(graphed, device_clock(target.profile), trial, ladder)


def load_exact(folder: Folder, target: Target, chosen: Encoder) -> Encoder:
    """Load `chosen` in fp32, on the target's device and without CUDA graphs. `load_encoder` has compared its path."""
    exact = replace(target, precision="fp32", fused=False)
    if folder.universal:
        from .universal import UniversalEncoder

        return UniversalEncoder(folder, exact.profile, exact.dtype)
    return _packed(folder, exact) if chosen.path == "packed" else PaddedEncoder(folder, exact)


def _packed(folder: Folder, target: Target, *, prepack: bool = True) -> PackedEncoder:
    from .packed import PackedEncoder

    return PackedEncoder.load(folder, target.profile, target.dtype, prepack=prepack, fused=target.fused)


def least_cosine(folder: Folder, encoder: Encoder, reference: Encoder) -> float:
    """Return the least cosine between both encoders' vectors of trial sequences."""
    import torch

    words = words_of(folder)
    lengths = [min(length, folder.max_length) for length in (300, 150, 60, 33, 33, 16, 7, 7, 3)]
    batch = TokenBatch.of(trial_tokens(length, words, start=17 * row) for row, length in enumerate(lengths))
    with torch.inference_mode():
        cosines = torch.nn.functional.cosine_similarity(encoder(batch).double(), reference(batch).double())
    return float(cosines.nan_to_num(nan=-1.0).min())


# Trial ids stay within the vocabulary: on a card, an id outside it ends the whole process.
_USUAL_WORDS = 1000  # assumed vocabulary if config.json gives no size
_FIRST, _SPAN = 100, 800  # most vocabularies have whole words after the special tokens


def words_of(folder: Folder) -> int:
    """Return the size of the model's vocabulary."""
    return int(folder.config.get("vocab_size") or _USUAL_WORDS)


def trial_tokens(length: int, words: int, *, start: int = 0) -> TokenIds:
    """Return one sequence for a vocabulary of `words` tokens; `start` varies its contents."""
    first = min(_FIRST, words // 2)
    ids = first + (start + 31 * np.arange(length)) % min(_SPAN, words - first)
    return ids.astype(np.int32)


def trial_batch(tokens: int, longest: int, words: int) -> TokenBatch:
    """Return `tokens` tokens in as few sequences as the model's `longest` allows."""
    starts = range(0, tokens, longest)
    return TokenBatch.of(trial_tokens(min(longest, tokens - start), words, start=start) for start in starts)


# -------------------------------------------------------------------------------------------------------------- padded


class PaddedEncoder:
    """An `Encoder` that pads a batch to one length. It runs transformers' model, with mean or CLS pooling in fp32, or
    else sentence-transformers' modules."""

    pauses = 0

    def __init__(self, folder: Folder, target: Target) -> None:
        import torch

        from .staging import uploads_for

        self.path = "padded" if folder.pooling else "sentence-transformers"
        self._pooling = folder.pooling
        self._multiple = target.profile.padding_multiple(target.precision)
        self._longest = folder.max_length
        self._pad_id = int(folder.config.get("pad_token_id") or 0)
        self._uploads = uploads_for(torch.device(target.profile.torch_name))
        self._model: Any
        device, dtype = target.profile.torch_name, target.dtype
        with quiet_transformers():
            if not folder.pooling:
                from sentence_transformers import SentenceTransformer

                self._model = SentenceTransformer(
                    str(folder.path),
                    device=device,
                    trust_remote_code=False,
                    local_files_only=True,
                    model_kwargs={"use_safetensors": True, "dtype": dtype},
                ).eval()
                return
            from safetensors import SafetensorError
            from transformers import AutoModel

            try:
                model, found = AutoModel.from_pretrained(
                    folder.encoder,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    dtype=dtype,
                    output_loading_info=True,
                )
            except (ValueError, KeyError, OSError, SafetensorError) as error:
                raise ModelUnsupported(f"model {folder.name!r}: transformers cannot load it: {error}") from error
        missing = sorted(name for name in found["missing_keys"] if not name.startswith("pooler."))
        if missing:  # transformers would fill them with random numbers
            raise ModelUnsupported(f"model {folder.name!r} lacks the tensor {missing[0]!r}")
        self._model = model.to(device).eval()

    def __call__(self, batch: TokenBatch, pause: Pause | None = None) -> torch.Tensor:
        """Copy ids and mask to the device as int32 in one transfer, widen them there, compute and pool."""
        ids, mask = rectangle(batch, width=width_of(batch, self._multiple, self._longest), pad_id=self._pad_id)
        room = self._uploads.room(2 * ids.size).reshape(2, *ids.shape)
        room[0], room[1] = ids, mask
        given = dict(zip(("input_ids", "attention_mask"), self._uploads.send().view(2, *ids.shape).long(), strict=True))
        if not self._pooling:
            vectors: torch.Tensor = self._model(given)["sentence_embedding"]
            return vectors.float()
        hidden: torch.Tensor = self._model(**given).last_hidden_state.float()
        if self._pooling == "cls":
            return hidden[:, 0]
        weights: torch.Tensor = given["attention_mask"].unsqueeze(-1).float()
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch off transformers' progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]

"""Choose how a model is computed on a device: the fastest way that gives the right vectors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .. import ModelUnsupported, TokenBatch
from ..folder import PACKAGED, Folder
from .padded import load_padded
from .target import Encoder, Target, trial_tokens, words_of

if TYPE_CHECKING:
    from .packed import PackedEncoder

# Least cosine between the packed and the padded path, both in fp32, for a model that is not packaged.
AGREEMENT = 0.99999
# Least cosine between the packed path in a shorter precision and the padded one in fp32; rounding gives more.
ROUGH_AGREEMENT = 0.99


@dataclass(frozen=True, slots=True)
class Chosen:
    """An encoder, and the reason for it."""

    encoder: Encoder
    reason: str


def load_encoder(folder: Folder, target: Target, *, packed: bool = True) -> Chosen:
    """Return the fastest encoder of this model that gives the right vectors on this device."""
    from .architectures import refusal
    from .int8 import load_int8
    from .packed import PackedEncoder

    if target.precision == "int8":
        found = Chosen(*load_int8(folder, target.profile, target.dtype))
        if folder.name not in PACKAGED:
            _check_reader(folder, Target(target.profile, "fp32"))
        return found
    why_not = refusal(folder) if packed else "padding was asked for"
    if why_not is not None:
        return Chosen(load_padded(folder, target), why_not)
    encoder = PackedEncoder.load(folder, target.place)
    if target.profile.kind == "cpu" and folder.name in PACKAGED:
        return Chosen(encoder, "verified to match Transformers")
    chosen = _compared(folder, target, encoder)
    if target.profile.kind == "cpu" or chosen.encoder is not encoder:
        return chosen
    return _on_card(target, encoder, chosen.reason, words_of(folder))


def _on_card(target: Target, encoder: PackedEncoder, reason: str, words: int) -> Chosen:
    """Add CUDA graphs if they measure faster. They need an attention that is recorded once for all lengths.

    `words`: size of the vocabulary.
    """
    import torch

    from .graphs import CudaRecorder, Trials, with_graphs
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
        Trials(words, always=target.graphs == "on"),
    )
    return Chosen(best, f"{reasons}; {why}")


def _compared(folder: Folder, target: Target, encoder: Encoder) -> Chosen:
    """Compare with transformers: in fp32, where no rounding hides a wrong architecture, and in a shorter precision."""
    exact = replace(target, precision="fp32")
    reference = load_padded(folder, exact)
    structure = encoder if target.precision == "fp32" else _plain_packed(folder, exact)
    least, rough = least_cosine(folder, structure, reference), least_cosine(folder, encoder, reference)
    if least >= AGREEMENT and rough >= ROUGH_AGREEMENT:
        return Chosen(encoder, f"self-test: matches Transformers (least cosine {least:.7f})")
    worst = min(least, rough)
    reason = f"self-test: packed vectors differ from those of Transformers (least cosine {worst:.5f})"
    return Chosen(reference if target.precision == "fp32" else load_padded(folder, target), reason)


def _check_reader(folder: Folder, exact: Target) -> None:
    """Check the packed path in fp32, with which INT8 is compared. Raises ModelUnsupported."""
    least = least_cosine(folder, _plain_packed(folder, exact), load_padded(folder, exact))
    if not least >= AGREEMENT:
        raise ModelUnsupported(
            f"model {folder.name!r} cannot be computed in int8: in a self-test its packed vectors differ"
            f" from those of Transformers (least cosine {least:.5f}); use precision auto"
        )


def _plain_packed(folder: Folder, target: Target) -> Encoder:
    from .linears import PlainLinears
    from .packed import PackedEncoder

    return PackedEncoder.load(folder, target.place, PlainLinears())


def least_cosine(folder: Folder, encoder: Encoder, reference: Encoder) -> float:
    """Return the least cosine between both encoders' vectors of sequences of equal and different lengths.

    They have up to 300 tokens if the model takes so many, which exceeds the window of layers that have one.
    """
    import torch

    words = words_of(folder)
    lengths = [min(length, folder.max_length) for length in (300, 150, 60, 33, 33, 16, 7, 7, 3)]
    batch = TokenBatch.of(trial_tokens(length, words, start=17 * row) for row, length in enumerate(lengths))
    with torch.inference_mode():
        cosines = torch.nn.functional.cosine_similarity(encoder(batch).double(), reference(batch).double())
    return float(cosines.nan_to_num(nan=-1.0).min())

"""Which way to compute a model is taken on a device: the best one that is known, or seen, to give the right vectors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from . import ModelUnsupported
from .folder import PACKAGED, Folder
from .rectangular import load_rectangular
from .target import Encoder, Target
from .trial_tokens import trial_tokens, words_of

if TYPE_CHECKING:
    from .packed import PackedEncoder

AGREEMENT = 0.99999
"""Least cosine between the packed and the padded path, both in fp32, for a model that is not packaged."""
ROUGH_AGREEMENT = 0.99
"""Least cosine between the packed path in a shorter precision and the padded one in fp32: less is no rounding."""


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
        return Chosen(encoder, "verified to match Transformers")
    chosen = _compared(folder, target, encoder)
    if target.profile.kind == "cpu" or chosen.encoder is not encoder:
        return chosen
    return _on_card(target, encoder, chosen.reason, words_of(folder))


def _on_card(target: Target, encoder: PackedEncoder, reason: str, words: int) -> Chosen:
    """With CUDA graphs where they pay: they need an attention that is recorded once for every length. `words`: of the
    vocabulary."""
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
    """Whether the architecture was understood is seen in fp32, where rounding hides nothing; whether a shorter
    precision works, by how near its vectors are to those."""
    exact = replace(target, precision="fp32")
    reference = load_rectangular(folder, exact)
    structure = encoder if target.precision == "fp32" else _plain_packed(folder, exact)
    least, rough = least_cosine(folder, structure, reference), least_cosine(folder, encoder, reference)
    if least >= AGREEMENT and rough >= ROUGH_AGREEMENT:
        return Chosen(encoder, f"self-test: matches Transformers (least cosine {least:.7f})")
    worst = min(least, rough)
    reason = f"self-test: packed vectors differ from those of Transformers (least cosine {worst:.5f})"
    return Chosen(reference if target.precision == "fp32" else load_rectangular(folder, target), reason)


def _check_reader(folder: Folder, exact: Target) -> None:
    """INT8 is compared with the packed path in fp32; is that one right? Raises ModelUnsupported."""
    least = least_cosine(folder, _plain_packed(folder, exact), load_rectangular(folder, exact))
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
    """Between the vectors of both for sequences of equal and of different lengths, as long as the model takes them up
    to 300: beyond the window of every layer that has one."""
    import torch

    words = words_of(folder)
    lengths = [min(length, folder.max_length) for length in (300, 150, 60, 33, 33, 16, 7, 7, 3)]
    batch = [trial_tokens(length, words, start=17 * row) for row, length in enumerate(lengths)]
    with torch.inference_mode():
        cosines = torch.nn.functional.cosine_similarity(encoder(batch).double(), reference(batch).double())
    return float(cosines.nan_to_num(nan=-1.0).min())

"""A packed encoder in INT8: calibrated on texts, compared with fp32 on others before it is used. Knows models and
texts; how 8-bit layers compute stands in `int8.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ..device import DeviceProfile
from . import DeviceUnavailable, ModelUnsupported, TokenIds, calibration
from .architectures import refusal
from .compute_thread import one_thread
from .folder import Folder
from .int8 import MISSING, Int8Linears, Observing, probe_products
from .packed import PackedEncoder, Place
from .probe import gain
from .tokenizing import RustTokenizer

LEARNT, JUDGED = 96, 32
"""Texts for calibration, and others for the comparison."""
BATCH = 1024
"""Tokens of a batch of them, about."""
PAYS = 1.3
"""Measured gain over fp32 from which a CPU is taken to have 8-bit products; with VNNI it is 1.7 to 4."""
LEAST_COSINE = 0.98
"""Between INT8 and fp32. all-MiniLM-L6-v2 has 0.996 at the least; what is below finds other neighbours."""


def load_int8(
    folder: Folder, profile: DeviceProfile, dtype: torch.dtype, texts: Sequence[str] | None = None
) -> tuple[PackedEncoder, str]:
    """The encoder with activations in `dtype` between its 8-bit layers, and in words how near fp32 it is. `texts`: what
    to calibrate on instead of the packaged texts. Raises DeviceUnavailable or ModelUnsupported with the reason."""
    why_not = refusal(folder)
    if why_not is None and folder.config.get("model_type") == "modernbert":
        why_not = "its feed-forward is gated"
    if why_not is not None:
        raise ModelUnsupported(f"model {folder.name!r} cannot be computed in int8: {why_not}; use precision auto")
    measured = int8_gain()
    if measured < PAYS:
        raise DeviceUnavailable(
            f"precision int8 cannot be used on {profile.name}: 8-bit products measured {measured:.2f} x as fast"
            " as fp32; use bf16, fp32 or auto"
        )
    tokenizer = RustTokenizer.load(folder)
    observing = Observing()
    exact = PackedEncoder.load(folder, Place.cpu(torch.float32), observing)
    learnt = calibration.texts(LEARNT, 5) if texts is None else texts
    judged = batches(tokenizer.ids(calibration.texts(JUDGED, 6)))
    with torch.inference_mode():
        for batch in batches(tokenizer.ids(learnt)):
            exact(batch)
        seen = list(observing.seen)
        try:
            encoder = PackedEncoder.load(folder, Place(profile, dtype), Int8Linears(seen))
            near = _cosines(encoder, exact, judged)
        except MISSING as error:
            raise DeviceUnavailable(
                f"precision int8: this torch lacks its operators ({type(error).__name__})"
            ) from error
    least = float(near.min())
    if not least >= LEAST_COSINE:
        raise ModelUnsupported(
            f"model {folder.name!r} loses too much in int8: cosine {least:.4f} to fp32 at the least of {JUDGED} texts,"
            f" {LEAST_COSINE} is wanted; use precision auto"
        )
    return (
        encoder,
        f"8-bit layers, calibrated; cosine to fp32 {least:.4f} at the least, {float(near.mean()):.4f} on average",
    )


Pair = tuple[Callable[[], object], Callable[[], object]]


def int8_gain(products: Callable[[], Pair | None] = probe_products) -> float:
    """How many times as fast an 8-bit product is as one in fp32, by CPU seconds; 0 where there is none."""
    pair = products()
    if pair is None:
        return 0.0
    with one_thread(), torch.inference_mode():
        return gain(*pair)


def batches(tokens: Sequence[TokenIds]) -> list[list[TokenIds]]:
    """Longest first, so that neighbours are of like length."""
    return list(_cut(sorted(tokens, key=len, reverse=True)))


def _cut(tokens: Sequence[TokenIds]) -> Iterator[list[TokenIds]]:
    batch: list[TokenIds] = []
    for each in tokens:
        if batch and sum(map(len, batch)) + len(each) > BATCH:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def _cosines(one: PackedEncoder, other: PackedEncoder, tokens: Sequence[list[TokenIds]]) -> torch.Tensor:
    parts = [torch.nn.functional.cosine_similarity(one(batch).double(), other(batch).double()) for batch in tokens]
    return torch.cat(parts).nan_to_num(nan=-1.0)

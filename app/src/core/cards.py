"""Published figures of NVIDIA's cards, as data with their sources; found by the name that the driver gives a card.
Knows nothing of the machine at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Precision = Literal["fp32", "tf32", "fp16", "bf16", "int8"]
"""What an engine may compute in."""
Format = Literal["fp32", "tf32", "fp16", "bf16", "int8", "fp8"]
"""What a card's products may be in; nothing here computes in fp8."""
Capability = tuple[int, int]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
FORMATS: tuple[Format, ...] = get_args(Format)


@dataclass(frozen=True, slots=True)
class Sustained:
    """A rate that somebody measured over time, TFLOP/s (INT8: TOPS); `source`: who, and what was computed."""

    rate: float
    source: str


@dataclass(frozen=True, slots=True)
class Card:
    """Dense rates of a GPU: TFLOP/s (INT8: TOPS), memory bandwidth in GB/s. No sparsity figures.

    `unread`: formats whose figure was not seen in a source. `sustained` is empty where nobody's measurement is known.
    """

    capability: Capability
    peaks: Mapping[Format, float]
    bandwidth: float
    unread: frozenset[Format] = frozenset()
    sustained: Mapping[Format, Sustained] = field(default_factory=dict)


_AMPERE_100: Mapping[Format, float] = {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312, "int8": 624}
_HOPPER: Mapping[Format, float] = {"fp32": 67, "tf32": 495, "fp16": 990, "bf16": 990, "int8": 1979, "fp8": 1979}
_BLACKWELL: Mapping[Format, float] = {"fp32": 75, "tf32": 1100, "fp16": 2250, "bf16": 2250, "int8": 4500, "fp8": 4500}
_T4_SUSTAINED: Mapping[Format, Sustained] = {
    "fp16": Sustained(24, "products of 4096 x 4096 x 4096 under the cap of 70 W; NVIDIA developer forum, topic 264462"),
    "int8": Sustained(38, "BERT-base whole, 128 tokens, batch 32; NVIDIA/TensorRT demo/BERT, TensorRT 8.4"),
}

# NVIDIA's data sheets. The P4's fp16 runs at 1/64 of its fp32 rate (GP104); the P100 has fast fp16, no tensor cores.
CARDS: Mapping[str, Card] = {
    "Tesla P4": Card((6, 1), {"fp32": 5.5, "fp16": 0.089, "int8": 22}, 192),
    "Tesla P100": Card((6, 0), {"fp32": 10.6, "fp16": 21.2}, 732),
    "Tesla V100": Card((7, 0), {"fp32": 15.7, "fp16": 125, "int8": 62.8}, 900, frozenset({"int8"})),
    "Tesla T4": Card((7, 5), {"fp32": 8.1, "fp16": 65, "int8": 130}, 320, sustained=_T4_SUSTAINED),
    "NVIDIA A100": Card((8, 0), _AMPERE_100, 1555),
    "NVIDIA A100 80GB": Card((8, 0), _AMPERE_100, 2039),
    "NVIDIA A10": Card(
        (8, 6),
        {"fp32": 31.2, "tf32": 62.5, "fp16": 125, "bf16": 125, "int8": 250},
        600,
        frozenset({"fp32", "tf32", "fp16", "bf16", "int8"}),
    ),
    "NVIDIA L4": Card((8, 9), {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121, "int8": 242, "fp8": 242}, 300),
    "NVIDIA H100": Card((9, 0), _HOPPER, 3350),
    "NVIDIA H200": Card((9, 0), _HOPPER, 4800),
    "NVIDIA B200": Card((10, 0), _BLACKWELL, 8000, frozenset({"fp32", "tf32", "int8"})),
}
# PCIe boards of these have other rates than the SXM ones above; better no figure than a wrong one.
_OTHER_RATES = ("pcie", "nvl", "a10g", "mig")


def card_of(name: str, capability: Capability) -> Card | None:
    """The listed card of this name (`NVIDIA A100-SXM4-80GB`), the most exact one; None for any other."""
    if any(word in name.lower() for word in _OTHER_RATES):
        return None
    words = set(name.replace("-", " ").split())
    matches = [known for known in CARDS if set(known.split()[1:]) <= words and CARDS[known].capability == capability]
    return CARDS[max(matches, key=len)] if matches else None

"""What is chosen on a device, and why, as one list that doctor, `/v1/info` and the benchmark show alike.

Chooses nothing itself: it asks `device`. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .builds import what_to_install
from .device import PRECISIONS, DeviceError, DeviceProfile, Precision, choose_precision


@dataclass(frozen=True, slots=True)
class Setting:
    """`value` None: there is none, and `reason` says why."""

    name: str
    value: str | int | float | bool | None
    reason: str


def settings_of(
    profile: DeviceProfile,
    bf16_gain: Callable[[], float] | None = None,
    *,
    requested: str = "auto",
    chosen: tuple[Precision, str] | None = None,
) -> list[Setting]:
    """What the engine chooses on this device, and why. `requested` is `embedding.precision`, `bf16_gain` as
    `choose_precision` has it. `chosen` is what a loaded engine has (its precision and the reason): then nothing is
    chosen or measured anew. Raises DeviceError for a precision that cannot be had here.
    """
    precision, reason = chosen or choose_precision(profile, requested, bf16_gain)
    settings = [
        Setting("precision", precision, reason),
        Setting("padding_multiple", profile.padding_multiple(precision), _padding(profile, precision)),
        Setting("attention", profile.attention, "the fastest attention kernel that takes a mask"),
        Setting("tf32", precision == "tf32" and profile.tf32, _tf32(profile, precision)),
        *(_of_card(profile) if profile.kind == "cuda" else _of_cpu(profile)),
    ]
    for other in PRECISIONS:
        try:
            choose_precision(profile, other)
        except DeviceError as refusal:
            settings.append(Setting(f"embedding {other}", None, str(refusal)))
    if not profile.peaks:
        settings.append(Setting("share_of_peak", None, _no_peak(profile)))
    return settings


def _padding(profile: DeviceProfile, precision: Precision) -> str:
    if profile.padding_multiple(precision) > 1:
        return "tensor cores work on blocks of 16 bytes"
    return "not needed: no tensor cores in use"


def _tf32(profile: DeviceProfile, precision: Precision) -> str:
    if not profile.tf32:
        if profile.kind == "cpu":
            return "not available on CPU"
        return f"needs compute capability 8.0, this card has {_dotted(profile)}"
    if precision == "tf32":
        return "requested: fp32 products with inputs rounded to 10 bits, as in fp16"
    if precision == "fp32":
        return "off, so that fp32 is not rounded; precision tf32 switches it on"
    return f"off: not used with {precision}, and rows computed again in fp32 are exact"


def _of_card(profile: DeviceProfile) -> list[Setting]:
    capability = profile.capability or (0, 0)
    formats = " ".join(profile.tensor_core_formats) or None
    why = "by compute capability; nothing is computed in fp8" if formats else "tensor cores start at 7.0"
    settings = [
        Setting("tensor_cores", formats, f"compute capability {_dotted(profile)}: {why}"),
        Setting("torch_build", profile.builds[0].cuda if profile.builds else None, what_to_install(capability)),
    ]
    for name, found in profile.sustained.items():
        settings.append(Setting(f"sustained {name}", found.rate, f"TFLOP/s (int8: TOPS) as measured: {found.source}"))
    return settings


def _of_cpu(profile: DeviceProfile) -> list[Setting]:
    told = "reported by the system" if profile.instructions else "not reported by the system"
    value = " ".join(profile.instructions) or None
    return [Setting("instructions", value, f"{told}; bf16 and int8 are chosen by measuring, not by this")]


def _dotted(profile: DeviceProfile) -> str:
    return ".".join(map(str, profile.capability or ()))


def _no_peak(profile: DeviceProfile) -> str:
    if profile.kind == "cpu":
        return "no published peak rates for CPUs"
    return f"this version knows no published peak rates of {profile.name!r}"

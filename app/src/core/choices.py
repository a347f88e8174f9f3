"""What is chosen on a device, and why, as one list that doctor, `/v1/info` and the benchmark show alike.

Chooses nothing itself: it asks `device`. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    multiple = profile.padding_multiple(precision)
    padding = "16 bytes fill a tensor core" if multiple > 1 else "no tensor cores in use: padding would be waste"
    settings = [
        Setting("precision", precision, reason),
        Setting("padding_multiple", multiple, padding),
        Setting("attention", profile.attention, "the fastest kernel of scaled_dot_product_attention that takes a mask"),
    ]
    for other in PRECISIONS:
        try:
            choose_precision(profile, other)
        except DeviceError as refusal:
            settings.append(Setting(f"embedding {other}", None, str(refusal)))
    if not profile.peaks:
        settings.append(Setting("share_of_peak", None, _no_peak(profile)))
    return settings


def _no_peak(profile: DeviceProfile) -> str:
    if profile.kind == "cpu":
        return "CPUs have no published rate per precision: clock and vector width under load decide"
    return f"no published dense rates of {profile.name!r} are known to this version"

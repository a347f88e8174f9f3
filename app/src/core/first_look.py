"""`python -m app.src.core.first_look DEVICE PRECISION`: test torch on the device and print its precision as JSON.

Runs in a separate process, so that a hanging driver cannot block the caller. Loads no model.
"""

from __future__ import annotations

import json
import sys

from .device import DeviceUnavailable, choose_precision, detect, devices_of


def look(device: str = "auto", precision: str = "auto") -> dict[str, object]:
    """Return `{"kind", "name", "capability", "precision", "reason"}`; of several devices all names. Raises
    DeviceUnavailable, also if torch lists a card but cannot compute on it, for example without kernels or a context."""
    import torch

    profiles = [detect(name) for name in devices_of(device)]
    for each in profiles:
        try:
            ones = torch.ones(16, 16, device=each.torch_name)
            total = float((ones @ ones).sum())
        except RuntimeError as error:
            raise DeviceUnavailable(f"{each.name} does not compute: {str(error).splitlines()[0]}") from None
        if total != 16.0**3:
            raise DeviceUnavailable(f"{each.name} computes wrongly: 16 x 16 x 16 gave {total}")
    profile, names = profiles[0], " and ".join(each.name for each in profiles)
    chosen, reason = choose_precision(profile, precision)
    named = {"kind": profile.kind, "name": names, "capability": profile.dotted_capability}
    return {**named, "precision": chosen, "reason": reason}


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(look(*sys.argv[1:])) + "\n")
    except DeviceUnavailable as refused:
        sys.exit(str(refused))

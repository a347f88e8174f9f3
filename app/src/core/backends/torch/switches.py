"""torch's switches that count for the whole process, each written in one place and never read back: torch mixes old and
new names for TF32, and reading the one after writing the other raises RuntimeError from 2.9 on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...device import DeviceProfile, Precision


class Tf32Switch:
    """TF32 for fp32 products, on while some engine has precision tf32 and none has fp32: an engine is never less exact
    than it was asked to be, whatever is loaded beside it. Thread-safe.
    """

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        """`write`: torch.set_float32_matmul_precision, the one name that every version of torch has."""
        self._write = write
        self._lock = threading.Lock()
        self._holders: dict[Precision, int] = {"tf32": 0, "fp32": 0}
        self._on = False

    def hold(self, profile: DeviceProfile, precision: Precision) -> bool:
        """An engine of this precision begins; whether TF32 is on now. Nothing is written where the card has no TF32."""
        return self._change(profile, precision, 1)

    def release(self, profile: DeviceProfile, precision: Precision) -> bool:
        """It has ended."""
        return self._change(profile, precision, -1)

    def _change(self, profile: DeviceProfile, precision: Precision, by: int) -> bool:
        if not profile.tf32:
            return False
        with self._lock:
            if precision in self._holders:
                self._holders[precision] = max(0, self._holders[precision] + by)
            wanted = self._holders["tf32"] > 0 and self._holders["fp32"] == 0
            if wanted is not self._on:
                self._set("high" if wanted else "highest")
                self._on = wanted
            return self._on

    def _set(self, precision: str) -> None:
        if self._write is not None:
            self._write(precision)
            return
        import torch

        torch.set_float32_matmul_precision(precision)


TF32 = Tf32Switch()
"""That of this process."""


def tune_convolutions(profile: DeviceProfile, on: bool) -> bool:
    """cuDNN's search for the fastest convolution (`embedding.cudnn_benchmark`); says whether it was switched on. It
    tries every algorithm for each new shape and keeps the fastest. Text encoders have no convolution, so there is
    nothing to try; one that had some would try anew for each length of its batches. Never switched off again."""
    if not on or profile.kind != "cuda":
        return False
    import torch

    torch.backends.cudnn.benchmark = True
    return True

"""Which kernel a product ran, and whether its name is one of tensor cores'. Asks torch's profiler on a card; elsewhere
there is none to ask about.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ..device import DeviceProfile

# By the names that cuBLAS and CUTLASS give their kernels. The instruction's shape is in most of them (s884 and h884 are
# Volta's, 1688 Turing's, 16816 Ampere's, 8816 and 16832 are of 8-bit numbers); PyTorch's Kineto tells them apart in the
# same way (tb_plugin, tensor_core.py). nvjet is cuBLAS's family from Hopper on, xmma's kernels without them say "ffma".
_OFF = re.compile(r"simt|ffma|dp4a|gemv|gemmk1|_[sdhi]gemm_", re.IGNORECASE)
_ON = re.compile(
    r"[hsi](884|8816|1688|16816|16832)(?!\d)|hmma|imma|gmma|tensorop|tensor\d+x\d+x\d+|nvjet|xmma_|wmma|utcmma",
    re.IGNORECASE,
)


def on_tensor_cores(kernel: str) -> bool | None:
    """By its name; None for a name that says nothing."""
    if _OFF.search(kernel):
        return False
    return True if _ON.search(kernel) else None


def kernel_of(profile: DeviceProfile, run: Callable[[], object]) -> str | None:
    """The kernel that took longest in one call, by torch's profiler; None without a card, or where it cannot look."""
    if profile.kind != "cuda":
        return None
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    with torch.cuda.device(profile.index):
        try:
            with recording(activities=[ProfilerActivity.CUDA]) as recorded:
                run()
                torch.cuda.synchronize()
        except RuntimeError:  # CUPTI is not there, or another profiler holds it
            return None
    kernels = [
        (float(event.time_range.elapsed_us()), str(event.name))
        for event in recorded.events() or ()
        if event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset"))
    ]
    return max(kernels)[1] if kernels else None

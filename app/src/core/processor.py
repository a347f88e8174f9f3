"""What the processor is and which of its instructions matter for matrix products, as the system tells it. That says
what it could do; whether it pays is measured when a model is loaded (`backends/torch/probe.py`).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

INSTRUCTIONS: Mapping[str, tuple[frozenset[str], ...]] = {
    "avx2": (frozenset({"avx2"}),),
    "avx512": (frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}),),
    "avx512_bf16": (frozenset({"avx512_bf16"}),),
    "avx512_fp16": (frozenset({"avx512_fp16"}),),
    "vnni": (frozenset({"avx512_vnni"}), frozenset({"avx_vnni"})),
    "amx_bf16": (frozenset({"amx_tile", "amx_bf16"}),),
    "amx_int8": (frozenset({"amx_tile", "amx_int8"}),),
    "neon": (frozenset({"asimd"}),),
    "sve": (frozenset({"sve"}),),
    "bf16": (frozenset({"asimd", "bf16"}),),
    "i8mm": (frozenset({"i8mm"}),),
}
"""Our name -> the flags of Linux' /proc/cpuinfo, any one set of them. The last four are ARM's."""
_CPUINFO = Path("/proc/cpuinfo")


def instructions_of(cpuinfo: str) -> tuple[str, ...]:
    """Those of INSTRUCTIONS that the first processor of /proc/cpuinfo's text has, in that order."""
    line = _value(cpuinfo, "flags") or _value(cpuinfo, "Features") or ""
    flags = set(line.split())
    return tuple(name for name, ways in INSTRUCTIONS.items() if any(way <= flags for way in ways))


def instructions() -> tuple[str, ...]:
    """Empty where the system does not tell (only Linux does); a virtual machine may hide some."""
    return instructions_of(_cpuinfo())


def name() -> str:
    return _value(_cpuinfo(), "model name") or platform.processor() or platform.machine() or "CPU"


def memory_bytes() -> int:
    """Of the whole machine; 0 where it cannot be had."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def _cpuinfo() -> str:
    try:
        return _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _value(cpuinfo: str, key: str) -> str | None:
    """Of the first line with this key."""
    for line in cpuinfo.splitlines():
        found, colon, value = line.partition(":")
        if colon and found.strip() == key:
            return value.strip()
    return None

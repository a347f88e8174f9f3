"""What a CPU has, read from texts of /proc/cpuinfo."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.src.core import device
from app.src.core.device import INSTRUCTIONS, detect, instructions_of

AVX512 = "avx512f avx512dq avx512bw avx512vl"

# flags -> names, in the order of INSTRUCTIONS
CPUS: list[tuple[str, str, str]] = [
    ("flags", "fpu sse4_2 avx", ""),
    ("flags", "avx avx2 fma", "avx2"),
    ("flags", f"avx2 {AVX512}", "avx2 avx512"),
    ("flags", "avx2 avx512f avx512cd", "avx2"),  # a Xeon Phi: not what our kernels mean by avx512
    ("flags", f"avx2 {AVX512} avx512_vnni", "avx2 avx512 vnni"),
    ("flags", "avx2 avx_vnni", "avx2 vnni"),
    ("flags", f"avx2 {AVX512} avx512_bf16 avx512_vnni", "avx2 avx512 avx512_bf16 vnni"),
    (
        "flags",
        f"avx2 {AVX512} avx512_bf16 avx512_vnni avx512_fp16 amx_bf16 amx_tile amx_int8",
        "avx2 avx512 avx512_bf16 avx512_fp16 vnni amx_bf16 amx_int8",
    ),
    ("flags", "avx2 amx_bf16", "avx2"),  # a kernel that gives no tiles
    ("Features", "fp asimd evtstrm sve i8mm bf16", "neon sve bf16 i8mm"),
    ("Features", "fp asimd", "neon"),
]


@pytest.mark.parametrize(("key", "flags", "names"), CPUS)
def test_flags_as_names(key: str, flags: str, names: str) -> None:
    text = f"processor\t: 0\nmodel name\t: Some CPU\n{key}\t\t: {flags}\n\nprocessor\t: 1\n{key}\t\t: none\n"
    assert instructions_of(text) == tuple(names.split())


def test_every_name_is_found_by_some_cpu() -> None:
    assert set(INSTRUCTIONS) == {name for _, _, names in CPUS for name in names.split()}


def test_a_system_that_tells_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "_CPUINFO", tmp_path / "absent")
    profile = detect("cpu")
    assert profile.instructions == ()
    assert profile.name
    assert instructions_of("") == ()


def test_the_profile_of_this_machine_has_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name\t: Test CPU @ 2 GHz: fast\nflags\t: avx2 avx_vnni\n")
    monkeypatch.setattr(device, "_CPUINFO", tmp_path / "cpuinfo")
    profile = detect("cpu")
    assert (profile.name, profile.instructions) == ("Test CPU @ 2 GHz: fast", ("avx2", "vnni"))


@pytest.mark.skipif(not device._CPUINFO.is_file(), reason="only Linux tells")
def test_torch_agrees_about_this_cpu() -> None:
    import torch

    told = torch.backends.cpu.get_cpu_capability()
    if told in ("AVX2", "AVX512"):
        assert told.lower() in detect("cpu").instructions

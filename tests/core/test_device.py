"""Which precision each card gets, and what is refused; no card and no torch needed except where marked."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.src.core import device
from app.src.core.device import (
    CARDS,
    DeviceProfile,
    DeviceUnavailable,
    choose_precision,
    detect,
    kernels_exist,
)

P4, P100, V100, T4 = (DeviceProfile.of_card(f"Tesla {name}") for name in ("P4", "P100", "V100", "T4"))
A100, A10, L4, H200 = (DeviceProfile.of_card(f"NVIDIA {name}") for name in ("A100", "A10", "L4", "H200"))
CPU = DeviceProfile.cpu()


@pytest.mark.parametrize(
    ("profile", "capability", "precision"),
    [
        (P4, (6, 1), "fp32"),
        (P100, (6, 0), "fp32"),
        (V100, (7, 0), "fp16"),
        (T4, (7, 5), "fp16"),
        (A100, (8, 0), "fp16"),
        (A10, (8, 6), "fp16"),
        (L4, (8, 9), "fp16"),
        (H200, (9, 0), "fp16"),
        (CPU, None, "fp32"),
    ],
    ids=lambda value: value.name if isinstance(value, DeviceProfile) else None,
)
def test_automatic_precision(profile: DeviceProfile, capability: tuple[int, int] | None, precision: str) -> None:
    assert profile.capability == capability
    chosen, reason = choose_precision(profile)
    assert chosen == precision
    assert len(reason) > 20


@pytest.mark.parametrize(
    ("profile", "cores"),
    [
        (P4, set()),
        (V100, {"fp16"}),
        (T4, {"fp16", "int8"}),
        (A10, {"fp16", "bf16", "tf32", "int8"}),
        (H200, {"fp16", "bf16", "tf32", "int8"}),
        (CPU, set()),
    ],
    ids=lambda value: value.name if isinstance(value, DeviceProfile) else None,
)
def test_tensor_cores(profile: DeviceProfile, cores: set[str]) -> None:
    assert profile.tensor_cores == cores
    assert profile.tf32 == ("tf32" in cores)


@pytest.mark.parametrize(
    ("profile", "precision", "says"),
    [
        (T4, "bf16", "8.0, this card has 7.5; use fp16"),
        (T4, "tf32", "8.0, this card has 7.5; use fp16"),
        (P4, "bf16", "use fp32"),
        (P4, "fp16", "1/64"),
        (CPU, "fp16", "fp32, bf16 or auto"),
        (CPU, "tf32", "fp32, bf16 or auto"),
        (H200, "int8", "owl-sap calibrate NAME"),
        (CPU, "half", "not one of auto, fp32, tf32"),
    ],
)
def test_impossible_precision_is_refused_with_the_way_out(profile: DeviceProfile, precision: str, says: str) -> None:
    with pytest.raises(DeviceUnavailable, match=says):
        choose_precision(profile, precision)


@pytest.mark.parametrize(
    ("profile", "precision"), [(CPU, "bf16"), (T4, "fp32"), (A10, "tf32"), (L4, "bf16"), (P100, "fp16")]
)
def test_possible_precision_is_taken(profile: DeviceProfile, precision: str) -> None:
    assert choose_precision(profile, precision) == (precision, "requested")


@pytest.mark.parametrize(
    ("profile", "precision", "multiple"),
    [
        (T4, "fp16", 8),
        (T4, "int8", 16),
        (T4, "fp32", 1),
        (A10, "tf32", 4),
        (A10, "bf16", 8),
        (P4, "fp32", 1),
        (CPU, "fp32", 1),
    ],
)
def test_padding_is_a_matter_of_tensor_cores(profile: DeviceProfile, precision: str, multiple: int) -> None:
    assert profile.padding_multiple(precision) == multiple  # type: ignore[arg-type]


def test_rates_of_a_card_are_found_by_its_driver_name() -> None:
    assert DeviceProfile.cuda("Tesla T4", (7, 5)).peaks.get("fp16") == 65
    assert DeviceProfile.cuda("NVIDIA A100-SXM4-40GB", (8, 0)).peaks.get("bf16") == 312
    assert DeviceProfile.cuda("NVIDIA A10", (8, 6)).bandwidth == 600
    assert DeviceProfile.cuda("NVIDIA H200", (9, 0)).peaks.get("fp16") == 990
    assert DeviceProfile.cuda("Tesla V100-SXM2-16GB", (7, 0)).peaks.get("bf16") is None


@pytest.mark.parametrize(
    "name", ["NVIDIA H100 PCIe", "NVIDIA A10G", "NVIDIA L40S", "NVIDIA RTX 4000", "NVIDIA H200 NVL"]
)
def test_other_cards_get_no_rates_rather_than_wrong_ones(name: str) -> None:
    assert not DeviceProfile.cuda(name, (9, 0) if "H" in name else (8, 6)).peaks


def test_listed_cards_agree_with_their_capability() -> None:
    """Where each figure has a source."""
    for name in set(CARDS) - {"NVIDIA A10", "NVIDIA B200"}:
        profile = DeviceProfile.of_card(name)
        slow = {"Tesla P4": {"fp16", "int8"}, "Tesla P100": {"fp16"}}.get(name, set())
        assert set(profile.peaks) - {"fp32"} == set(profile.tensor_core_formats) | slow, name


@pytest.mark.parametrize(
    ("built_for", "capability", "runs"),
    [
        (["sm_75", "sm_80", "sm_90"], (7, 5), True),
        (["sm_75", "sm_80"], (8, 9), True),
        (["sm_75", "sm_80"], (7, 0), False),
        (["sm_60", "sm_70"], (6, 1), True),
        (["sm_80"], (9, 0), False),
        (["sm_80", "compute_80"], (9, 0), True),
        (["sm_90a", "sm_100"], (10, 0), True),
        (["sm_86"], (8, 0), False),
        ([], (7, 5), True),
    ],
)
def test_kernels_of_a_build(built_for: list[str], capability: tuple[int, int], runs: bool) -> None:
    assert kernels_exist(built_for, capability) is runs


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:x", "cuda:-1", "auto:1", ""])
def test_unknown_device(device: str) -> None:
    with pytest.raises(DeviceUnavailable, match="is not auto, cpu, cuda, cuda:N or all"):
        detect(device)


def test_cpu_is_described() -> None:
    profile = detect("cpu")
    assert profile.kind == "cpu"
    assert profile.name
    assert profile.memory_bytes > 1 << 28
    assert profile.torch_name == "cpu"
    assert DeviceProfile.of_card("Tesla T4").torch_name == "cuda:0"


def test_cuda_without_cuda_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceUnavailable, match="use device cpu"):
        detect("cuda")
    assert detect("auto").kind == "cpu"


@pytest.mark.gpu
def test_this_gpu_is_described() -> None:
    profile = detect("cuda")
    assert profile.capability is not None
    assert profile.memory_bytes > 1 << 30
    assert profile.multiprocessors > 0
    import torch

    assert ("bf16" in profile.tensor_cores) == torch.cuda.is_bf16_supported(including_emulation=False)


def test_the_processors_name_is_the_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "_CPUINFO", tmp_path / "cpuinfo")
    assert device.detect("cpu").name
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Test CPU @ 2 GHz: fast\nflags\t: avx2\n")
    assert device.detect("cpu").name == "Test CPU @ 2 GHz: fast"

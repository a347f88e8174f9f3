"""Fused kernels: the same numbers as torch's own functions, taken only if right and faster, said in the reason."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from app.src.core.backends.folder import read_folder
from app.src.core.backends.torch import encoders, kernels, packed
from app.src.core.backends.torch.architectures import EncoderWeights, LayerWeights
from app.src.core.backends.torch.backend import EngineOptions, _target
from app.src.core.backends.torch.kernels import Kernels, choose_kernels, fused_gelu
from app.src.core.backends.torch.linears import AddNorm, Affine, Linear, linear, linear_add_norm
from app.src.core.backends.torch.packed import PackedEncoder, flash_attention
from app.src.core.device import DeviceProfile
from app.src.core.loading import load_engine
from app.src.core.tokens import TokenBatch
from tests.core.conftest import MINILM

WIDTH = 48
T4 = replace(DeviceProfile.of_card("Tesla T4"), multiprocessors=1)  # few rows fill it
HAS_TRITON = importlib.util.find_spec("triton") is not None


def affine(*shape: int, dtype: torch.dtype = torch.float16) -> Affine:
    return Affine((torch.randn(shape) / shape[-1] ** 0.5).to(dtype), (torch.randn(shape[0]) / 2).to(dtype))


def encoder_weights(dtype: torch.dtype = torch.float16) -> EncoderWeights:
    torch.manual_seed(3)
    square, norm = affine(WIDTH, WIDTH, dtype=dtype), affine(WIDTH, dtype=dtype)
    layer = LayerWeights(
        query_key_value=affine(3 * WIDTH, WIDTH, dtype=dtype),
        attention_out=square,
        attention_norm=norm,
        wide=affine(4 * WIDTH, WIDTH, dtype=dtype),
        narrow=affine(WIDTH, 4 * WIDTH, dtype=dtype),
        out_norm=norm,
    )
    table = torch.zeros(8, WIDTH, dtype=dtype)
    return EncoderWeights(table, table, norm, [layer], 4, 1e-12, None)


class Clock:
    """Seconds that pass when a kernel is computed, as its cost says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def costs(self, seconds: float, work: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def computed(*given: torch.Tensor) -> torch.Tensor:
            self.now += seconds
            return work(*given)

        return computed


def add_norm_of_torch(layer: Affine, norm: Affine, epsilon: float) -> tuple[Linear, AddNorm]:
    """Divide the work as the Triton kernel does: the product without bias, then the rest in fp32."""
    bias, width = layer.bias, norm.weight.shape
    assert bias is not None
    assert norm.bias is not None
    weight, shift = norm.weight.float(), norm.bias.float()

    def normed(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.float() + bias.float() + residual.float(), width, weight, shift, epsilon).to(x.dtype)

    return linear(Affine(layer.weight)), normed


def tried(
    monkeypatch: pytest.MonkeyPatch,
    *,
    cost: float = 1.0,
    gelu: Callable[[Affine], Linear] = fused_gelu,
    add_norm: Callable[[Affine, Affine, float], tuple[Linear, AddNorm]] = add_norm_of_torch,
    dtype: torch.dtype = torch.float16,
) -> Kernels:
    """Choose between torch's functions, which take 2 seconds, and fused ones, which take `cost` seconds."""
    clock = Clock()

    def slowed(seconds: float, makes: Callable[..., tuple[Linear, AddNorm]]) -> Callable[..., tuple[Linear, AddNorm]]:
        def made(*given: Any) -> tuple[Linear, AddNorm]:
            product, norm = makes(*given)
            return product, clock.costs(seconds, norm)

        return made

    plain = Kernels(lambda layer: clock.costs(2.0, linear(layer, gelu=True)), slowed(2.0, linear_add_norm))
    monkeypatch.setattr(kernels, "fused_gelu", lambda layer: clock.costs(cost, gelu(layer)))
    monkeypatch.setattr(kernels, "fused_add_norm", slowed(cost, add_norm))
    found = choose_kernels(T4, encoder_weights(dtype), plain, clock)
    # What was taken, by name.
    return Kernels(
        plain.gelu if found.gelu is plain.gelu else fused_gelu,
        plain.add_norm if found.add_norm is plain.add_norm else add_norm_of_torch,
        found.reason,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bias_and_gelu_in_the_product_are_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer, x = affine(64, 16, dtype=dtype), torch.randn(9, 16).to(dtype)
    wanted = F.gelu(F.linear(x.float(), layer.weight.float(), layer.bias.float() if layer.bias is not None else None))
    tolerance = kernels.TOLERANCE.get(dtype, 1e-3)
    torch.testing.assert_close(fused_gelu(layer)(x).float(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_right_and_faster_kernels_are_taken(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    found = tried(monkeypatch, dtype=dtype)
    assert (found.gelu, found.add_norm) == (fused_gelu, add_norm_of_torch)
    assert found.reason == (
        "experimental kernels: GELU in the product used (measured 2.00 x as fast); "
        "bias, sum and LayerNorm in one used (measured 2.00 x as fast)"
    )


def test_slower_kernels_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried(monkeypatch, cost=1.99)
    assert found.gelu is not fused_gelu
    assert found.add_norm is not add_norm_of_torch
    assert found.reason.count("not used (measured 1.01 x as fast)") == 2


def no_bias(layer: Affine) -> Linear:
    return lambda x: F.gelu(F.linear(x, layer.weight))


def no_residual(layer: Affine, norm: Affine, epsilon: float) -> tuple[Linear, AddNorm]:
    product, normed = add_norm_of_torch(layer, norm, epsilon)
    return product, lambda x, residual: normed(x, torch.zeros_like(residual))


def not_a_number(layer: Affine, norm: Affine, epsilon: float) -> tuple[Linear, AddNorm]:
    return linear(layer), lambda x, _: torch.full_like(x, float("nan"))


@pytest.mark.parametrize("gelu", [no_bias, lambda layer: lambda x: F.relu(F.linear(x, layer.weight, layer.bias))])
@pytest.mark.parametrize("add_norm", [no_residual, not_a_number])
def test_wrong_kernels_are_not_taken(monkeypatch: pytest.MonkeyPatch, gelu: Any, add_norm: Any) -> None:
    found = tried(monkeypatch, gelu=gelu, add_norm=add_norm)
    assert found.gelu is not fused_gelu
    assert found.add_norm is not add_norm_of_torch
    assert found.reason.count("not used (off by ") == 2


def test_each_kernel_is_judged_alone_and_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def uncompiled(*_given: Any) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore lines")

    found = tried(monkeypatch, add_norm=uncompiled)
    assert found.gelu is fused_gelu
    assert found.add_norm is not add_norm_of_torch
    assert found.reason.endswith(
        "in one not used (RuntimeError: Failed to find C compiler. Please specify via CC environment variable.)"
    )


@pytest.mark.skipif(HAS_TRITON, reason="Triton is installed")
def test_without_triton_torch_computes() -> None:
    plain = Kernels.of_torch()
    found = choose_kernels(T4, encoder_weights(), plain, Clock())
    assert found.add_norm is plain.add_norm
    assert "ModuleNotFoundError: No module named 'triton'" in found.reason


@pytest.mark.parametrize(("profile", "dtype"), [(T4, torch.float32), (DeviceProfile.cpu(), torch.float16)])
def test_only_a_card_in_half_precision_has_them(profile: DeviceProfile, dtype: torch.dtype) -> None:
    plain = Kernels.of_torch()
    found = choose_kernels(profile, encoder_weights(dtype), plain)
    assert (found.gelu, found.add_norm) == (plain.gelu, plain.add_norm)
    assert "need a card and half precision" in found.reason


def test_an_encoder_computes_with_the_kernels_it_is_given(monkeypatch: pytest.MonkeyPatch, minilm_folder: Path) -> None:
    folder, cpu = read_folder(minilm_folder, MINILM), DeviceProfile.cpu()
    batch = TokenBatch.of([[101, 2000, 3000, 102], [101, *range(4000, 4030), 102]])
    taken = Kernels(fused_gelu, add_norm_of_torch, "both")
    monkeypatch.setattr(packed, "choose_kernels", lambda *_: taken)
    with torch.inference_mode():
        plain = PackedEncoder.load(folder, cpu, torch.float32, prepack=False)(batch)
        encoder = PackedEncoder.load(folder, cpu, torch.float32, prepack=False, fused=True)
        found = encoder(batch)
    assert encoder.kernels_reason == "both"
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)


def test_they_are_off_unless_switched_on() -> None:
    assert not _target(EngineOptions(device="cpu"))[0].fused
    assert _target(EngineOptions(device="cpu", experimental_kernels=True))[0].fused


def test_the_reason_of_a_card_names_the_kernels(monkeypatch: pytest.MonkeyPatch, minilm_folder: Path) -> None:
    folder, card = read_folder(minilm_folder, MINILM), DeviceProfile.of_card("Tesla T4")

    def load(*_given: object, fused: bool = False, **_named: object) -> PackedEncoder:
        encoder = PackedEncoder.__new__(PackedEncoder)
        encoder.attention = packed.memory_efficient_attention
        encoder.attention = flash_attention
        encoder.attention_reason, encoder.kernels_reason = "attention", "kernels" if fused else ""
        return encoder

    monkeypatch.setattr(PackedEncoder, "load", load)
    monkeypatch.setattr(encoders, "PaddedEncoder", lambda *_: None)
    monkeypatch.setattr(encoders, "least_cosine", lambda *_: 1.0)
    for fused, words in ((True, "attention; kernels; CUDA graphs"), (False, "attention; CUDA graphs")):
        _encoder, reason = encoders.load_encoder(folder, encoders.Target(card, "fp16", graphs=False, fused=fused))
        assert words in reason


# ------------------------------------------------------------------------------------------------- the Triton kernel

INTERPRETED = """
import torch
from torch.nn import functional as F
from app.src.core.backends.torch.linears import Affine
from app.src.core.backends.torch.triton_norm import add_norm

torch.manual_seed(1)
for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)):
    for rows, width in ((1, 24), (7, 384), (33, 768), (3, 1024)):
        x, residual, bias, weight, shift = (
            torch.randn(shape).to(dtype) for shape in ((rows, width), (rows, width), (width,), (width,), (width,))
        )
        summed = x.float() + bias.float() + residual.float()
        wanted = F.layer_norm(summed, (width,), weight.float(), shift.float(), 1e-12)
        kept = residual.clone()
        found = add_norm(x, bias, residual, Affine(weight, shift), 1e-12)
        assert found.dtype == dtype and torch.equal(residual, kept)
        torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=tolerance)
print("equal")
"""


COMPILED = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from app.src.core.backends.torch.triton_norm import _add_norm

class Card:
    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

for capability in (75, 80, 90):
    driver.set_active(Card(capability))
    _add_norm.device_caches.clear()
    for dtype in (torch.float16, torch.bfloat16):
        kernels = set()
        for rows, epsilon in ((1, 1e-12), (16, 1e-12), (17, 1e-5)):
            x, bias = torch.zeros(rows, 384, dtype=dtype), torch.zeros(384, dtype=dtype)
            made = _add_norm.warmup(x, bias, x, bias, bias, epsilon, WIDTH=384, BLOCK=512, grid=(rows,))
            assert made.asm["cubin"]
            kernels.add(made.hash)
        assert len(kernels) == 1, "another number of rows compiles another kernel"
print("equal")
"""


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize(("script", "interpret"), [(INTERPRETED, "1"), (COMPILED, "0")], ids=["computed", "compiled"])
def test_tritons_kernel_is_layer_norm_of_the_sum(script: str, interpret: str, tmp_path: Path) -> None:
    """In Triton's interpreter, which must be chosen before Triton is imported, and compiled for cards: once for all
    numbers of rows, because a graph cannot be recorded while a kernel is compiled."""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout == "equal\n", ended.stderr


# --------------------------------------------------------------------------------------------------------- on a card


@pytest.mark.gpu
@pytest.mark.parametrize("width", [384, 1024])
def test_kernels_of_a_card_are_torchs_and_can_be_recorded(width: int) -> None:
    from app.src.core.backends.torch.graphs import cuda_recorder

    if not any(map(shutil.which, ("gcc", "clang", os.environ.get("CC", "cc")))):
        pytest.skip("Triton needs a C compiler")
    torch.manual_seed(1)
    device = torch.device("cuda", torch.cuda.current_device())

    def on_card(one: Affine) -> Affine:
        return Affine(one.weight.to(device), one.bias.to(device) if one.bias is not None else None)

    wide, out, norm = (on_card(one) for one in (affine(4 * width, width), affine(width, width), affine(width)))
    plain, fused = Kernels.of_torch(), Kernels(fused_gelu, kernels.fused_add_norm)
    x = torch.randn(100, width, dtype=torch.float16, device=device)

    def computed(made: Kernels) -> list[torch.Tensor]:
        product, normed = made.add_norm(out, norm, 1e-12)
        return [made.gelu(wide)(x), normed(product(x), x)]

    with torch.inference_mode():
        wanted, found = computed(plain), computed(fused)
        recording, both = cuda_recorder(device)(lambda: torch.cat(computed(fused), dim=1))
        x.normal_()
        recording.replay()
        again = torch.cat(computed(plain), dim=1)
    for one, other in [*zip(wanted, found, strict=True), (again, both)]:
        torch.testing.assert_close(other, one, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_an_engine_with_experimental_kernels_gives_the_same_vectors(minilm_folder: Path) -> None:
    texts = [" ".join(["hydraulic pump seal"] * (1 + number % 40)) + f" {number}" for number in range(200)]
    with load_engine(EngineOptions(str(minilm_folder), device="cuda")) as engine:
        plain = engine.embed(texts)
    with load_engine(EngineOptions(str(minilm_folder), device="cuda", experimental_kernels=True)) as engine:
        fused, reason = engine.embed(texts), engine.path_reason
    assert "experimental kernels: " in reason
    assert float(np.einsum("ij,ij->i", plain, fused).min()) > 0.999

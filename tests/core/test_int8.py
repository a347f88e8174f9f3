"""8-bit layers on a CPU: the self-test on CPUs that this machine imitates, and the vectors of the packaged model."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.src.benchmark.workloads import sap_like_texts
from app.src.core.backends.folder import read_folder
from app.src.core.backends.tokenizing import RustTokenizer
from app.src.core.backends.torch import int8
from app.src.core.backends.torch.int8 import load_int8, observe, quantised, unusable
from app.src.core.backends.torch.packed import PackedEncoder
from app.src.core.device import DeviceProfile

CPU = DeviceProfile.cpu()
_FLAGS = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
_VNNI = any(flag in _FLAGS for flag in ("avx512_vnni", "avx_vnni", "amx_int8"))
needs_vnni = pytest.mark.skipif(not _VNNI, reason="this CPU has no VNNI")


@needs_vnni
def test_cpus_with_vnni_can_be_used() -> None:
    assert unusable() is None


def test_values_are_rounded_and_limited() -> None:
    unusable()  # torch's announcement of a removal is made once, there
    x = torch.tensor([[-9.0, -0.6, 0.0, 0.26, 0.24, 999.0]])
    assert quantised(x, (0.5, 10)).tolist() == [[0, 9, 10, 11, 10, 255]]


@needs_vnni
def test_the_self_test_finds_products_without_zero_points_and_forgets_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    right = int8._Product

    def product(*given: Any) -> Any:
        made = right(*given)
        made.scale = made.scale[0], 0
        return made

    def full(*_: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    for name, faulty, said in (("_Product", product, "overflow"), ("quantised", full, "out of memory")):
        int8._worst_error.cache_clear()
        with monkeypatch.context() as patched:
            patched.setattr(int8, name, faulty)
            assert said in str(unusable())
    assert unusable() is None


@needs_vnni
def test_vectors_of_texts_that_were_not_observed_are_close(minilm_folder: Path) -> None:
    folder = read_folder(minilm_folder, "all-MiniLM-L6-v2")
    texts = sap_like_texts(random.Random(1), 200, 2.8, 0.5, (5, 40))
    ranges = observe(folder, texts)
    assert {name.partition("/")[2] for name in ranges} == {"query_key_value", "attention_out", "wide", "narrow"}
    encoder = load_int8(folder, CPU, ranges)
    exact = PackedEncoder.load(folder, CPU, torch.float32)
    batch = RustTokenizer.load(folder).ids(["a conveyor belt was replaced", "customer complaint: housing damaged"])
    with torch.inference_mode():
        cosines = torch.nn.functional.cosine_similarity(encoder(batch), exact(batch))
        assert 0.99 < float(cosines.min()) < 0.99999
        np.testing.assert_array_equal(encoder(batch), encoder(batch))


@needs_vnni
@pytest.mark.parametrize(("gain", "long"), [(3.0, torch.bfloat16), (0.9, torch.float32)])
def test_attention_of_long_texts_is_in_bf16_if_it_is_faster(
    minilm_folder: Path, monkeypatch: pytest.MonkeyPatch, gain: float, long: torch.dtype
) -> None:
    monkeypatch.setattr(int8, "bf16_gain", lambda: gain)
    folder, computed = read_folder(minilm_folder, "all-MiniLM-L6-v2"), list[torch.dtype]()
    texts = [" ".join(sap_like_texts(random.Random(seed), 9, 2.8, 0.5, (5, 40))) for seed in range(20)]
    encoder, exact = load_int8(folder, CPU, observe(folder, texts)), PackedEncoder.load(folder, CPU, torch.float32)
    attention = encoder.attention
    encoder.attention = lambda qkv, *given: computed.append(qkv.dtype) or attention(qkv, *given)  # type: ignore[func-returns-value]
    tokenizer = RustTokenizer.load(folder)
    for some in (["a conveyor belt"], texts, ["a conveyor belt"]):
        batch = tokenizer.ids(some)
        with torch.inference_mode():
            assert float(torch.nn.functional.cosine_similarity(encoder(batch), exact(batch)).min()) > 0.98
    layers = len(computed) // 3
    assert computed == [torch.float32] * layers + [long] * layers + [torch.float32] * layers


@needs_vnni
@pytest.mark.parametrize("outer", [0, 1])
def test_a_batch_computed_within_another_does_not_change_it(
    minilm_folder: Path, monkeypatch: pytest.MonkeyPatch, outer: int
) -> None:
    monkeypatch.setattr(int8, "bf16_gain", lambda: 3.0)
    folder = read_folder(minilm_folder, "all-MiniLM-L6-v2")
    short, long = ["a conveyor belt"], [" ".join(sap_like_texts(random.Random(1), 9, 2.8, 0.5, (5, 40)))]
    encoder, tokenizer = load_int8(folder, CPU, observe(folder, short + long)), RustTokenizer.load(folder)
    batch, within = (tokenizer.ids((short, long)[which]) for which in (outer, 1 - outer))
    with torch.inference_mode():
        alone = encoder(batch)

        def pause() -> None:
            encoder(within)

        torch.testing.assert_close(encoder(batch, pause), alone, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.skipif("avx512_vnni" not in _FLAGS, reason="imitates other CPUs on one with AVX512-VNNI")
@pytest.mark.parametrize(("isa", "usable"), [("AVX512_CORE_VNNI", True), ("AVX512_CORE", False), ("AVX2", False)])
def test_cpus_without_vnni_are_refused(isa: str, usable: bool) -> None:
    """oneDNN imitates them: without VNNI its sums saturate."""
    code = "from app.src.core.backends.torch.int8 import unusable; print(unusable())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("overflow" in run.stdout, run.stdout.strip() == "None") == (not usable, usable)

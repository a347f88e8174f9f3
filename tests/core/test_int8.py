"""INT8 on a CPU: 8-bit arithmetic, what calibration sees, and an encoder that is used only when it is near fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from app.src.core.backends import DeviceUnavailable, ModelUnsupported, TokenBatch
from app.src.core.backends.torch import int8
from app.src.core.backends.torch.int8 import Grid, Int8Linears, Observing, Product, Seen, smoothed
from app.src.core.backends.torch.linears import Affine
from app.src.core.engine import EmbeddingEngine
from app.src.core.loading import EngineOptions, load_engine

MINILM = "all-MiniLM-L6-v2"
ODD = ["", " ", "\x00", "a", "🦉 pump", "x" * 3000, "pump " * 400, "Ölpumpe undicht, 3 Stück à 4,50 €", "漢字 ポンプ"]


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def fast_products() -> None:
    """Without the instructions oneDNN would take its reference, which is right but takes minutes. The best of a few:
    what is asked is whether the CPU has them, not how busy it is."""
    if max(int8.int8_gain() for _ in range(3)) < int8.PAYS:
        pytest.skip("this CPU has no fast 8-bit products")


eight_bits = pytest.mark.usefixtures("fast_products")


# ---------------------------------------------------------------------------------------------------------- arithmetic


@given(st.floats(-30, 0), st.floats(0.01, 30), st.integers(0, 1000))
def test_a_grid_rounds_to_nearest_and_cuts_off(low: float, high: float, seed: int) -> None:
    grid = Grid.over(low, high)
    x = random(6, 5, seed=seed) * 10
    numbers = grid.scale * (grid(x).float() - grid.zero)
    inside = x.clamp(grid.scale * -grid.zero, grid.scale * (int8.UNSIGNED - grid.zero))
    assert float((numbers - inside).abs().max()) <= grid.scale * 0.502
    assert grid.scale * (float(grid(torch.zeros(1))) - grid.zero) == 0.0


def test_ranges_without_zero_and_of_no_width_have_a_grid() -> None:
    assert Grid.over(2.0, 4.0).zero == 0
    assert Grid.over(-4.0, -2.0).zero == int8.UNSIGNED
    assert Grid.over(0.0, 0.0).scale > 0


@eight_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_the_layer_over_the_grids_numbers(dtype: torch.dtype, gelu: bool, bias: bool) -> None:
    """Against arithmetic in double precision on what the 8 bits stand for, so only the last rounding may differ."""
    weight, shift, x = random(24, 16), random(24, seed=2), random(9, 16, seed=3)
    grid = Grid.over(float(x.min()), float(x.max()))
    product = Product(weight, shift if bias else None, grid, gelu=gelu)
    rows = grid(x)
    scales = weight.abs().amax(1, keepdim=True) / int8.SIGNED
    wanted = (rows.double() - grid.zero) * grid.scale @ ((weight / scales).round() * scales).double().T
    wanted = wanted + shift.double() if bias else wanted
    wanted = F.gelu(wanted) if gelu else wanted
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(product(rows, dtype).double(), wanted, rtol=tolerance, atol=tolerance)
    if not gelu:
        more = random(9, 24, seed=4).to(dtype)
        before = more.clone()
        found = product.adding(rows, more)
        torch.testing.assert_close(found.double(), wanted + more.double(), rtol=tolerance, atol=2 * tolerance)
        torch.testing.assert_close(more, before, msg="what is added must not be written to")
    onto = Grid.over(-3.0, 5.0)
    back = onto.scale * (product.onto(rows, onto).double() - onto.zero)
    cut = wanted.clamp(-onto.scale * onto.zero, onto.scale * (int8.UNSIGNED - onto.zero))
    assert float((back - cut).abs().max()) <= onto.scale * 0.51


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_smoothing_changes_what_is_rounded_not_what_is_computed(seed: int) -> None:
    x = random(50, 16, seed=seed) * torch.logspace(-1, 1.5, 16)
    seen = Seen(Affine(random(8, 16, seed=seed + 1)))
    seen.see(x[:20])
    seen.see(x[20:])
    torch.testing.assert_close(seen.reach, x.abs().amax(0))
    grid, weight = smoothed(seen)
    assert grid.factors is not None
    torch.testing.assert_close((x * grid.factors) @ weight.T, x @ seen.layer.weight.T, rtol=1e-3, atol=1e-3)
    reach = (x * grid.factors).abs().amax(0)
    torch.testing.assert_close(reach, weight.abs().amax(0), rtol=1e-3, atol=1e-4)  # both reach equally far


def layers(seed: int = 1) -> tuple[Affine, Affine, torch.Tensor, torch.Tensor]:
    """A feed-forward of 96 channels, two of which reach far; its inputs, and what is added."""
    first = random(96, 16, seed=seed) * 0.3
    first[[5, 60]] *= 40
    return (
        Affine(first, random(96, seed=seed + 1) * 0.1),
        Affine(random(16, 96, seed=seed + 2) * 0.1, random(16, seed=seed + 3)),
        random(200, 16, seed=seed + 4),
        random(200, 16, seed=seed + 5),
    )


def test_observing_changes_nothing_and_sees_each_layers_inputs() -> None:
    wide, narrow, x, more = layers()
    observing = Observing()
    feed_forward = observing.feed_forward(wide, narrow)
    inner = F.gelu(F.linear(x, wide.weight, wide.bias))
    wanted = F.linear(inner, narrow.weight, narrow.bias) + more
    torch.testing.assert_close(feed_forward(x, more), wanted, rtol=1e-4, atol=1e-4)
    first, second = observing.seen
    torch.testing.assert_close(first.high, x.amax(0))
    torch.testing.assert_close(second.low, inner.amin(0), rtol=1e-4, atol=1e-5)
    assert (first.layer, second.layer) == (wide, narrow)


def error(monkeypatch: pytest.MonkeyPatch, outliers: int) -> float:
    monkeypatch.setattr(int8, "OUTLIERS", outliers)
    wide, narrow, x, more = layers()
    observing = Observing()
    wanted = observing.feed_forward(wide, narrow)(x, more)
    found = Int8Linears(observing.seen).feed_forward(wide, narrow)(x, more)
    return float((found - wanted).norm() / (wanted - more).norm())


@eight_bits
def test_channels_that_reach_far_do_not_spoil_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with_two, with_one = error(monkeypatch, 48), error(monkeypatch, 96)
    assert with_two < 0.03
    assert with_two < with_one / 2


# ------------------------------------------------------------------------------------------------------------- a model


@pytest.fixture(scope="module")
def engine(fast_products: None) -> Iterator[EmbeddingEngine]:
    with load_engine(EngineOptions(MINILM, device="cpu", precision="int8")) as engine:
        yield engine


def cosines(one: EmbeddingEngine, other: EmbeddingEngine, texts: list[str]) -> Any:
    return np.einsum("ij,ij->i", one.embed(texts).astype(np.float64), other.embed(texts))


def test_vectors_are_near_those_of_fp32(engine: EmbeddingEngine, minilm: EmbeddingEngine) -> None:
    texts = [*ODD, *int8.calibration_texts(60, 99)]
    found = cosines(engine, minilm, texts)
    assert found.min() > 0.985
    assert found[len(ODD) :].mean() > 0.997


def test_it_says_what_it_is(engine: EmbeddingEngine, minilm: EmbeddingEngine) -> None:
    assert (engine.precision, engine.precision_reason, engine.path) == ("int8", "asked for", "packed")
    assert "cosine to fp32 0.99" in engine._backend.info.path_reason
    assert engine.fingerprint != minilm.fingerprint


def test_a_text_has_the_same_vector_in_every_batch_but_for_rounding(engine: EmbeddingEngine) -> None:
    texts = int8.calibration_texts(30, 7)
    together, alone = engine.embed(texts), np.concatenate([engine.embed([text]) for text in texts])
    assert np.einsum("ij,ij->i", together, alone).min() > 0.9999


@eight_bits
def test_what_is_not_finite_does_not_become_finite(minilm_folder: Path) -> None:
    """8 bits have no NaN: it must come through beside them, so that the engine sees it."""
    from app.src.core.backends.folder import read_folder
    from app.src.core.device import DeviceProfile

    encoder, _ = int8.load_int8(read_folder(minilm_folder, MINILM), DeviceProfile.cpu(), torch.float32)
    encoder._words = encoder._words.clone()
    encoder._words[2345] = torch.nan
    with torch.inference_mode():
        found = encoder(TokenBatch.of([[101, 2345, 102], [101, 2346, 102]]))
    assert [bool(row.isfinite().all()) for row in found] == [False, True]


@eight_bits
def test_other_texts_may_be_learnt_from(minilm_folder: Path) -> None:
    from app.src.core.backends.folder import read_folder
    from app.src.core.device import DeviceProfile

    folder = read_folder(minilm_folder, MINILM)
    _, reason = int8.load_int8(folder, DeviceProfile.cpu(), torch.float32, int8.calibration_texts(40, 12))
    assert "calibrated" in reason


# ------------------------------------------------------------------------------------------------------------- refusals


def load(folder: Path | str = MINILM) -> None:
    load_engine(EngineOptions(str(folder), device="cpu", precision="int8")).close()


def test_a_cpu_that_gains_nothing_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "int8_gain", lambda: 0.7)
    with pytest.raises(DeviceUnavailable, match=r"0\.70 x as fast as fp32; use bf16, fp32 or auto"):
        load()


@eight_bits
def test_a_torch_without_the_operators_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    monkeypatch.setattr(int8, "_operators", Nothing)
    assert int8.int8_gain() == 0.0
    monkeypatch.setattr(int8, "int8_gain", lambda: 3.0)
    with pytest.raises(DeviceUnavailable, match="lacks its operators"):
        load()


@eight_bits
def test_a_model_that_loses_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "int8_gain", lambda: 3.0)
    monkeypatch.setattr(int8, "LEAST_COSINE", 0.99999)
    with pytest.raises(ModelUnsupported, match=r"loses too much in int8: cosine 0\.99"):
        load()


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"model_type": "modernbert"}, "gated"), ({"model_type": "gpt2"}, "architecture gpt2"), ({}, None)],
)
def test_models_that_are_not_packed_are_refused(
    make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], reason: str | None
) -> None:
    from dataclasses import replace

    from app.src.core.backends.folder import read_folder
    from app.src.core.device import DeviceProfile

    monkeypatch.setattr(int8, "int8_gain", lambda: 3.0)
    found = read_folder(make_folder(), "tiny")
    folder = replace(found, config=found.config | {"hidden_activation": "gelu"} | config)
    if reason is None:
        folder = replace(folder, pooling="")
    with pytest.raises(ModelUnsupported, match=reason or "more than an encoder"):
        int8.load_int8(folder, DeviceProfile.cpu(), torch.float32)


def test_calibration_texts_are_the_same_everywhere() -> None:
    texts = int8.calibration_texts(96, 5)
    assert texts == int8.calibration_texts(96, 5)
    assert not set(texts[17:]) & set(int8.calibration_texts(32, 6)[17:])
    assert len(set(texts)) == len(texts)

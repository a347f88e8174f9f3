"""The packed path: runs, linears, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.src.core.backends import packed
from app.src.core.backends.folder import Folder, read_folder
from app.src.core.backends.packed import PackedEncoder, Run, runs_of


@given(st.lists(st.integers(1, 20), max_size=60))
def test_runs_cover_the_batch(lengths: list[int]) -> None:
    runs = runs_of(lengths)
    assert [run.length for run in runs for _ in range(run.count)] == lengths
    starts = [sum(lengths[:position]) for position in range(len(lengths))]
    assert [run.start + number * run.length for run in runs for number in range(run.count)] == starts


def test_neighbours_of_equal_length_share_a_run() -> None:
    assert runs_of([7, 7, 5, 7]) == [Run(0, 2, 7), Run(14, 1, 5), Run(19, 1, 7)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gelu", [False, True])
def test_linears_are_torchs(dtype: torch.dtype, gelu: bool) -> None:
    torch.manual_seed(1)
    weight, bias, x = torch.randn(24, 16).to(dtype), torch.randn(24).to(dtype), torch.randn(9, 16).to(dtype)
    wanted = torch.nn.functional.linear(x, weight, bias)
    wanted = torch.nn.functional.gelu(wanted) if gelu else wanted
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(packed._linear(weight, bias, gelu=gelu)(x), wanted, rtol=tolerance, atol=tolerance)


def test_a_fused_linear_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = torch.randn(8, 4), torch.randn(8), torch.randn(3, 4)
    monkeypatch.setattr(packed, "_onednn_linear", lambda *_args, **_named: lambda rows: rows @ weight.T)
    torch.testing.assert_close(packed._linear(weight, bias)(x), torch.nn.functional.linear(x, weight, bias))


def test_without_the_private_operators_plain_ones_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    monkeypatch.setattr(packed, "_operators", Nothing)
    weight, bias, x = torch.randn(8, 4), torch.randn(8), torch.randn(3, 4)
    assert packed._onednn_linear(weight, bias, gelu=False) is None
    torch.testing.assert_close(packed._linear(weight, bias)(x), torch.nn.functional.linear(x, weight, bias))


@pytest.fixture
def folder(minilm_folder: Path) -> Folder:
    return read_folder(minilm_folder, "all-MiniLM-L6-v2")


def test_plain_bert_is_supported(folder: Folder) -> None:
    assert PackedEncoder.supports(folder)


@pytest.mark.parametrize(
    "difference",
    [
        {"model_type": "roberta"},
        {"hidden_act": "gelu_new"},
        {"position_embedding_type": "relative_key"},
        {"is_decoder": True},
        {"hidden_size": 0},
    ],
)
def test_anything_else_is_not(folder: Folder, difference: dict[str, Any]) -> None:
    changed = replace(folder, config=folder.config | difference)
    if "hidden_size" in difference:
        changed = replace(folder, pooling="")
    assert not PackedEncoder.supports(changed)


def test_order_of_lengths_does_not_matter(folder: Folder) -> None:
    encoder = PackedEncoder.load(folder, torch.float32)
    batch = [[101, 2000 + number, 3000, *range(4000, 4000 + number), 102] for number in (5, 1, 5, 3, 1, 0)]
    with torch.inference_mode():
        together = encoder(batch)
        alone = torch.cat([encoder([tokens]) for tokens in batch])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)

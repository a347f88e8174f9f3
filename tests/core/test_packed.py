"""The packed path: places and positions, order, what is sent to a device, pooling by borders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.src.core.backends.folder import Folder, read_folder
from app.src.core.backends.torch.packed import (
    FEW_TOKENS,
    Layout,
    PackedEncoder,
    filled,
    positions_of,
)
from app.src.core.device import DeviceProfile
from app.src.core.tokens import TokenBatch


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_places_count_from_0_in_each_sequence(lengths: list[int]) -> None:
    assert positions_of(TokenBatch.of(range(length) for length in lengths)).tolist() == [
        place for length in lengths for place in range(length)
    ]


@settings(deadline=None)  # the first example imports transformers
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=12), st.integers(0, 3))
def test_counted_positions_are_those_of_transformers(sequences: list[list[int]], padding: int) -> None:
    from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

    theirs: Any = RobertaEmbeddings.create_position_ids_from_input_ids
    wanted = [theirs(torch.tensor([sequence]), padding)[0].tolist() for sequence in sequences]
    found = positions_of(TokenBatch.of(sequences), padding).tolist()
    assert found == [position for sequence in wanted for position in sequence]


@pytest.fixture
def folder(minilm_folder: Path) -> Folder:
    return read_folder(minilm_folder, "all-MiniLM-L6-v2")


def test_order_of_lengths_does_not_matter(folder: Folder) -> None:
    encoder = PackedEncoder.load(folder, DeviceProfile.cpu(), torch.float32)
    numbers = (5, 1, 5, 3, 1, 0)
    batch = TokenBatch.of([101, 2000 + number, 3000, *range(4000, 4000 + number), 102] for number in numbers)
    with torch.inference_mode():
        together = encoder(batch)
        alone = torch.cat([encoder(batch.select([place])) for place in range(len(batch))])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), empty=st.integers(0, 3))
def test_pooling_by_borders_is_pooling_by_runs(pooling: str, lengths: list[int], empty: int) -> None:
    """Cards pool by borders. Behind a batch there may be sequences without tokens, which pool to anything finite."""
    encoder = object.__new__(PackedEncoder)
    encoder._mean = pooling == "mean"
    x = torch.randn(sum(lengths), 5, generator=torch.Generator().manual_seed(sum(lengths)))
    layout = Layout.of(lengths, x.device)
    borders = torch.cat([layout.cumulative, layout.cumulative[-1:].repeat(empty)])
    found = encoder._pool(x, Layout((), max(lengths), borders))
    assert found.shape == (len(lengths) + empty, 5)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[: len(lengths)], encoder._pool(x, layout), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("multiple", "large"), [(16, 48), (64, 12)])
def test_batches_are_filled_up_so_that_there_are_few_sizes(multiple: int, large: int) -> None:
    sizes = {tokens: len(filled(TokenBatch.of([range(tokens)]), multiple).ids) for tokens in range(1, 2000)}
    assert len({sizes[tokens] for tokens in range(1, 1025)}) == 32 + large
    assert all(0 <= size - tokens < (8 if tokens < FEW_TOKENS else multiple) for tokens, size in sizes.items())


def test_a_cpu_computes_few_numbers_of_rows(minilm_folder: Path) -> None:
    """oneDNN keeps code for each."""
    folder = read_folder(minilm_folder, "all-MiniLM-L6-v2")
    encoder, seen = PackedEncoder.load(folder, DeviceProfile.cpu(), torch.float32), set[int]()
    layer = encoder._layers[0]
    encoder._layers = [lambda x, attend: seen.add(len(x)) or layer(x, attend)]  # type: ignore[func-returns-value, list-item]
    with torch.inference_mode():
        for tokens in (*range(300, 400, 9), *range(1000, 1100, 9)):
            encoder(TokenBatch.of([[101, 102]] * (tokens // 2)))
    assert seen == {320, 384, 448, 1024, 1152}


def test_filling_up_changes_no_vector(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = PackedEncoder.load(folder, DeviceProfile.cpu(), torch.float32)
    batch = TokenBatch.of([[101, 2000, 102], [101, *range(3000, 3040), 102]])
    with torch.inference_mode():
        longer = encoder(batch)
        monkeypatch.setattr("app.src.core.backends.torch.packed.filled", lambda batch, _: batch)
        plain = encoder(batch)
    assert longer.shape == plain.shape == (2, 384)
    torch.testing.assert_close(longer, plain, rtol=1e-4, atol=1e-5)

"""Tests that need a card and nothing but torch, transformers and plain pytest: scripts/gpu-proof runs them on machines
without hypothesis and pydantic. Other tests marked gpu stand beside what they share fixtures with.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.src.core.backends import Running, TokenBatch, Vectors
from app.src.core.backends.folder import read_folder
from app.src.core.backends.torch.encoders import trial_tokens
from app.src.core.backends.torch.graphs import FAST_LADDER, GraphedEncoder, cuda_recorder
from app.src.core.backends.torch.packed import Layout, PackedEncoder, candidates, choose, runs_of_equal_length
from app.src.core.backends.torch.process import TF32
from app.src.core.backends.torch.staging import SLOTS, CudaCard, Downloads, uploads_for
from app.src.core.device import DeviceProfile, detect
from app.src.core.memory import T4MemoryManager
from app.src.core.scan import CardScan

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


def test_numbers_come_back_from_a_card(device: torch.device) -> None:
    uploads, downloads = uploads_for(device), Downloads(CudaCard(device))
    pending: deque[tuple[Vectors, Running]] = deque()
    generator = np.random.default_rng(4)
    with torch.inference_mode():
        for number in range(200):
            values = generator.integers(0, 1000, size=1 + int(generator.integers(0, 50_000)), dtype=np.int32)
            uploads.room(len(values))[:] = values
            found = uploads.send().float()
            for _ in range(number % 5):  # keeps the device busy, so that copies run beside it
                found = found * 2 / 2
            pending.append((values.astype(np.float32), downloads.fetch(found.view(-1, 1))))
            if len(pending) > 4:
                wanted, one = pending.popleft()
                np.testing.assert_allclose(one()[:, 0], wanted, rtol=1e-5)
        for wanted, one in pending:
            np.testing.assert_allclose(one()[:, 0], wanted, rtol=1e-5)


def test_launching_on_a_card_does_not_wait(device: torch.device) -> None:
    card, downloads = CudaCard(device), Downloads(CudaCard(device))
    with torch.inference_mode():
        for _ in range(SLOTS):
            downloads.fetch(torch.ones(8, 8, device=device))()  # pins memory, which may wait for the card
        torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]  # cycles: some tenths of a second
        pending = downloads.fetch(torch.ones(8, 8, device=device))
        assert not card.computing().query(), "the device had time to come to its end"
    assert pending().sum() == 64


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_card_passes_its_trial(dtype: torch.dtype) -> None:
    profile = detect("cuda")
    chosen, reason = choose(profile, 12, 384, dtype)
    assert chosen is not runs_of_equal_length, reason


def test_the_choice_between_kernels_is_timed() -> None:
    """Prints the times of short and of long texts."""
    profile = detect("cuda")
    _chosen, reason = choose(profile, 12, 384, torch.float16)
    print(profile.name, reason)
    tried = candidates(profile, torch.float16)[:-1]
    if len(tried) > 1:
        for attention in tried:
            assert reason.count(f"{attention.__name__.replace('_', ' ')} ") == 2, reason


@pytest.mark.parametrize("lengths", [[17] * 40, [3, 64, 1], [512, 17, 300]])
def test_every_kernel_takes_empty_sequences_and_a_larger_bound(lengths: list[int]) -> None:
    """As recordings need them."""
    profile, heads = detect("cuda"), 12
    qkv = torch.randn(sum(lengths), 3 * 384, generator=torch.Generator().manual_seed(1))
    wanted = runs_of_equal_length(qkv, Layout.of(lengths, qkv.device), heads)
    starts = torch.tensor([0, *lengths, 0, 0], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
    for attention in candidates(profile, torch.float16)[:-1]:
        found = attention(qkv.half().cuda(), Layout((), 512, starts), heads).cpu()
        torch.testing.assert_close(found.float(), wanted, rtol=5e-3, atol=5e-3)


def test_cuda_graphs_give_the_computed_vectors(minilm_folder: Path) -> None:
    profile = detect("cuda")
    device = torch.device(profile.torch_name)
    loaded = PackedEncoder.load(read_folder(minilm_folder, "all-MiniLM-L6-v2"), profile, torch.float16)
    graphed = GraphedEncoder(loaded, cuda_recorder(device), uploads_for(device))
    with torch.inference_mode():
        graphed.record_all(FAST_LADDER)
        assert list(graphed.rungs) == list(FAST_LADDER)
        for lengths in ((5,), (9, 3, 30), (31,) * 32, (5,)):
            batch = TokenBatch.of(trial_tokens(length, 1000, start=row) for row, length in enumerate(lengths))
            cosines = torch.nn.functional.cosine_similarity(graphed(batch).double(), loaded(batch).double())
            assert float(cosines.min()) > 0.9999
    assert Layout.of([1], device).cumulative.is_cuda


def test_true_fp32_beside_tf32_on_a_card() -> None:
    """The same product three times: TF32 rounds it, fp32 beside it does not."""
    profile = DeviceProfile.cuda(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    if not profile.tf32:
        pytest.skip(f"{profile.name} has no TF32")
    left, right = (torch.randn(512, 512, device="cuda") for _ in range(2))
    exact = left.double() @ right.double()

    def error() -> float:
        return float(((left @ right).double() - exact).norm() / exact.norm())

    plain = error()
    TF32.hold(profile, "tf32")
    rounded = error()
    TF32.hold(profile, "fp32")
    beside = error()
    TF32.release(profile, "fp32")
    TF32.release(profile, "tf32")
    assert plain == pytest.approx(beside, rel=0.5)
    assert rounded > 20 * plain


def test_on_a_card_the_same_rows_are_found() -> None:
    profile = detect("cuda")
    chance, dimension = np.random.default_rng(5), 64
    rows = chance.standard_normal((3, dimension))[chance.integers(0, 3, 20_000)]
    rows = rows + 1e-3 * chance.standard_normal(rows.shape)  # many rows nearly as near
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    elsewhere: Any = None  # all rows fit
    copy = CardScan(profile, T4MemoryManager(profile), elsewhere).copy(dimension)
    copy.append(rows)
    assert copy.rows_on_card == len(rows)
    found, floor = copy.view().rank(rows[77:78], None)[0].best(10)
    truth = rows.astype(np.float64) @ rows[77].astype(np.float64)
    assert set(np.argsort(-truth)[:10].tolist()) <= set(found.tolist())
    assert np.delete(truth, found).max() < floor < 1

"""What a device makes of a training, how batches shrink, which checkpoint is gone on from: without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.src.core.device import DeviceProfile
from app.src.core.finetune.recipe import Pace, Recipe, Technique, TrainingFailed, last_checkpoint

PRECISIONS = {
    "Tesla P4": "fp32",
    "Tesla P100": "fp32",
    "Tesla V100": "fp16",
    "Tesla T4": "fp16",
    "NVIDIA A10": "bf16",
    "NVIDIA A100": "bf16",
    "NVIDIA L4": "bf16",
    "NVIDIA H100": "bf16",
    "NVIDIA H200": "bf16",
    "NVIDIA B200": "bf16",
}


@pytest.mark.parametrize("card", PRECISIONS)
def test_mixed_precision_by_card(card: str) -> None:
    technique = Technique.of(DeviceProfile.of_card(card))
    assert technique.precision == PRECISIONS[card]
    assert technique.reasons[0].startswith(technique.precision)
    assert (technique.optimizer, technique.pinned, technique.workers) == ("adamw_torch_fused", True, 2)


def test_a_cpu() -> None:
    technique = Technique.of(DeviceProfile.cpu())
    assert (technique.precision, technique.optimizer) == ("fp32", "adamw_torch")
    assert (technique.pinned, technique.workers) == (False, 0)


def test_halved_batches_keep_the_pairs_of_a_step_until_too_few_would_be_left() -> None:
    paces = [Pace(32), Pace(16, 2), Pace(8, 4), Pace(4, 8)]
    assert [pace.halved() for pace in paces[:3]] == paces[1:]
    with pytest.raises(TrainingFailed, match="memory does not hold 4 pairs at once"):
        paces[3].halved()


def test_steps_are_counted_over_all_epochs() -> None:
    assert [Recipe(epochs=2, batch_size=16).steps(pairs) for pairs in (1, 16, 17, 160)] == [2, 2, 4, 20]


def checkpoint(folder: Path, step: int, state: str | None) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"x")
    if state is not None:
        (path / "trainer_state.json").write_text(state, encoding="utf-8")
    return path


def test_the_newest_whole_checkpoint_counts_and_half_written_ones_go(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    whole = [checkpoint(tmp_path, step, json.dumps({"global_step": step})) for step in (9, 10)]
    torn = [
        checkpoint(tmp_path, 11, None),
        checkpoint(tmp_path, 12, '{"global_step": 1'),
        checkpoint(tmp_path, 13, '{"global_step": 12}'),
        checkpoint(tmp_path, 14, "[14]"),
    ]
    (tmp_path / "checkpoint-of-mine").mkdir()
    assert last_checkpoint(tmp_path) == whole[1], "10 is behind 9"
    assert [path.exists() for path in (*whole, *torn)] == [True, True, False, False, False, False]
    assert (tmp_path / "checkpoint-of-mine").exists()

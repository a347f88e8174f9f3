"""The precision of a device, steps, and which checkpoint is resumed: without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.src.core.device import DeviceProfile
from app.src.core.finetune.recipe import TrainingJob, last_checkpoint, precision_of

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
    assert precision_of(DeviceProfile.of_card(card)) == PRECISIONS[card]


def test_a_cpu() -> None:
    assert precision_of(DeviceProfile.cpu()) == "fp32"


def test_steps_are_counted_over_all_epochs(tmp_path: Path) -> None:
    cpu = DeviceProfile.cpu()
    jobs = [TrainingJob(tmp_path, tmp_path, [("a", "b")] * pairs, cpu, epochs=2) for pairs in (1, 16, 17, 160)]
    assert [job.steps for job in jobs] == [2, 2, 4, 20]


def checkpoint(folder: Path, step: int, state: str | None) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"x")
    if state is not None:
        (path / "trainer_state.json").write_text(state, encoding="utf-8")
    return path


def test_the_newest_whole_checkpoint_counts_and_half_written_ones_go(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) == (None, 0)
    whole = [checkpoint(tmp_path, step, json.dumps({"global_step": step})) for step in (9, 10)]
    torn = [
        checkpoint(tmp_path, 11, None),
        checkpoint(tmp_path, 12, '{"global_step": 1'),
        checkpoint(tmp_path, 13, '{"global_step": 12}'),
        checkpoint(tmp_path, 14, "[14]"),
    ]
    (tmp_path / "checkpoint-of-mine").mkdir()
    assert last_checkpoint(tmp_path) == (whole[1], 10), "10 is behind 9"
    assert [path.exists() for path in (*whole, *torn)] == [True, True, False, False, False, False]
    assert (tmp_path / "checkpoint-of-mine").exists()

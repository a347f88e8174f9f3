"""The training job, the precision for its device, and its checkpoints. Imports no torch."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..backends import EngineError
from ..device import DeviceProfile

Precision = Literal["fp32", "fp16", "bf16"]


class TrainingFailed(EngineError):
    """The training cannot continue; the message says why and what to change."""


def precision_of(profile: DeviceProfile) -> Precision:
    """Return the precision of activations: bf16 if the tensor cores support it (gradients do not underflow in its
    range), else fp16 with a scaled loss if they support that, else fp32. Weights and optimizer stay in fp32."""
    cores = profile.tensor_cores if profile.kind == "cuda" else ()
    return "bf16" if "bf16" in cores else "fp16" if "fp16" in cores else "fp32"


@dataclass(frozen=True, slots=True)
class TrainingObserver:
    """Callbacks. `say` gets a message for people; `step` gets steps done, all steps, and the last logged loss. `stop`
    is called after each step; true ends the training with a checkpoint."""

    say: Callable[[str], None] = lambda _text: None
    step: Callable[[int, int, float | None], None] = lambda _done, _steps, _loss: None
    stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """`base`: a sentence-transformers folder; `checkpoints`: the folder of checkpoints; `pairs`: query and text,
    with the model's prompts; `batch_size`: pairs per step; each pair uses the others' texts as negatives."""

    base: Path
    checkpoints: Path
    pairs: list[tuple[str, str]]
    profile: DeviceProfile
    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 2e-5
    seed: int = 7

    @property
    def steps(self) -> int:
        """Return the steps of all epochs."""
        return self.epochs * -(-len(self.pairs) // self.batch_size)


def last_checkpoint(folder: Path) -> tuple[Path | None, int]:
    """Return the newest complete checkpoint and its step, or (None, 0). Deletes incomplete checkpoints, because
    transformers would resume from them or count them as kept."""
    whole: dict[int, Path] = {}
    for path in folder.glob("checkpoint-*"):
        named = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if named is None:
            continue
        try:  # transformers writes this file after all others of a checkpoint
            state = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
            complete = state["global_step"] == int(named[1])
        except (OSError, ValueError, KeyError, TypeError):
            complete = False
        if complete:
            whole[int(named[1])] = path
        else:
            shutil.rmtree(path)
    return (whole[max(whole)], max(whole)) if whole else (None, 0)

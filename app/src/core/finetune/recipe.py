"""How a model is trained: the request, what the device allows, smaller batches when memory runs out, and checkpoints.
Imports no torch.
"""

from __future__ import annotations

import importlib.util
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

SMALLEST_BATCH = 4  # pairs; each learns from the others of its batch as counter-examples
WARMUP = 0.1  # share of the steps over which the learning rate rises; it falls linearly afterwards
CHECKPOINTS = 10  # per run; two are kept
LONGEST_BETWEEN = 500  # most steps between two checkpoints
_PACKAGES = ("accelerate", "datasets")  # of the extra `train`
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_LAST_WRITTEN = "trainer_state.json"  # transformers writes it after all other files of a checkpoint


class TrainingFailed(EngineError):
    """The training cannot continue; the message says why and what to change."""


def missing_packages() -> list[str]:
    return [name for name in _PACKAGES if importlib.util.find_spec(name) is None]


@dataclass(frozen=True, slots=True)
class Recipe:
    """`batch_size`: pairs of one optimizer step."""

    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 2e-5
    seed: int = 7

    def steps(self, pairs: int) -> int:
        """Return the optimizer steps over all epochs."""
        return self.epochs * -(-pairs // self.batch_size)


@dataclass(frozen=True, slots=True)
class Technique:
    """What a device allows. `workers`: processes that tokenize ahead. `reasons`: for people."""

    precision: Precision
    fused: bool
    workers: int
    pinned: bool
    reasons: tuple[str, ...]

    @property
    def optimizer(self) -> str:
        """transformers' name of AdamW: all parameters in one kernel, or one after another."""
        return "adamw_torch_fused" if self.fused else "adamw_torch"

    @classmethod
    def of(cls, profile: DeviceProfile, workers: int | None = None) -> Technique:
        """Choose mixed precision with weights and optimizer in fp32: bf16 where it has tensor cores (it has fp32's
        range, so no gradient underflows), else fp16 with a scaled loss, else fp32. torch's fused AdamW is a CUDA
        kernel. `workers` overrides the choice."""
        if profile.kind == "cpu":
            return cls("fp32", False, workers or 0, False, ("fp32: a CPU",))
        dotted = ".".join(map(str, profile.capability or ()))
        precision: Precision = "fp32"
        why = f"fp32: compute capability {dotted} has no tensor cores"
        if "bf16" in profile.tensor_cores:
            precision, why = "bf16", f"bf16: compute capability {dotted} has tensor cores for it"
        elif "fp16" in profile.tensor_cores:
            precision, why = "fp16", f"fp16 with a scaled loss: compute capability {dotted} has no bf16 tensor cores"
        reasons = (why, "fused AdamW", "pinned memory")
        return cls(precision, True, 2 if workers is None else workers, True, reasons)


@dataclass(frozen=True, slots=True)
class Pace:
    """`micro` pairs are computed at once, `accumulation` times per optimizer step."""

    micro: int
    accumulation: int = 1

    def halved(self) -> Pace:
        """Keep the pairs of a step and compute half as many at once: half the memory, fewer counter-examples. Raises
        TrainingFailed when too few would remain."""
        if self.micro // 2 < SMALLEST_BATCH or self.micro % 2:
            raise TrainingFailed(
                f"memory does not hold {self.micro} pairs at once, and smaller batches teach too little, because each "
                "pair learns from the others of its batch: use another card, a smaller model, or shorter texts"
            )
        return Pace(self.micro // 2, self.accumulation * 2)


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks of a training. `step`: steps done, all steps, the last logged loss. `stop` is asked after each step;
    true ends the training with a checkpoint."""

    step: Callable[[int, int, float | None], None] = lambda _done, _steps, _loss: None
    halved: Callable[[Pace], None] = lambda _pace: None
    stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """`base`: a sentence-transformers folder. `checkpoints`: their folder, searched when resuming. `pairs`: query and
    text of each."""

    base: Path
    checkpoints: Path
    pairs: list[tuple[str, str]]
    recipe: Recipe
    profile: DeviceProfile
    technique: Technique

    @property
    def steps(self) -> int:
        return self.recipe.steps(len(self.pairs))


@dataclass(frozen=True, slots=True)
class Trained:
    """`steps`: done in all. `began_at`: the step of the checkpoint that was resumed, 0 for none. `losses`: by step, as
    logged. `stopped`: `Hooks.stop` ended the training before its last step."""

    steps: int
    began_at: int
    pace: Pace
    losses: dict[int, float]
    stopped: bool


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint. Incomplete ones are deleted: transformers would resume from them, or count
    them among those to keep."""
    whole: dict[int, Path] = {}
    for path in folder.glob("checkpoint-*"):
        named = _CHECKPOINT.fullmatch(path.name)
        if named is None:
            continue
        if step_of(path) == int(named[1]):
            whole[int(named[1])] = path
        else:
            shutil.rmtree(path)
    return whole[max(whole)] if whole else None


def step_of(checkpoint: Path) -> int | None:
    """Return the step of a checkpoint, None for an incomplete one."""
    try:
        state = json.loads((checkpoint / _LAST_WRITTEN).read_text(encoding="utf-8"))
        step = state["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None

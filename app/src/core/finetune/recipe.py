"""How a model is trained: what is asked for, what the device makes of it, and how batches shrink when memory runs out.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..backends import EngineError
from ..device import DeviceProfile

Precision = Literal["fp32", "fp16", "bf16"]

SMALLEST_BATCH = 4
"""Pairs. Each learns from the others of its batch as counter-examples: of one pair alone nothing is learnt."""
WARMUP = 0.1
"""Share of the steps over which the learning rate rises; it falls in a straight line after that."""
CHECKPOINTS = 10
"""So many in a run; two of them are kept."""
LONGEST_BETWEEN = 500
"""Steps between two checkpoints at most."""


class TrainingFailed(EngineError):
    """The training cannot go on; the message says why and what to change."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is asked for. `batch_size`: pairs that one step of the optimizer sees."""

    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 2e-5
    seed: int = 7

    def steps(self, pairs: int) -> int:
        """Steps of the optimizer over all epochs."""
        return self.epochs * -(-pairs // self.batch_size)


@dataclass(frozen=True, slots=True)
class Technique:
    """What a device makes of it. `workers`: processes that tokenise ahead. `reasons` in words, for people."""

    precision: Precision
    fused: bool
    workers: int
    pinned: bool
    reasons: tuple[str, ...]

    @property
    def optimizer(self) -> str:
        """transformers' name of AdamW: all parameters in one kernel, or one after the other."""
        return "adamw_torch_fused" if self.fused else "adamw_torch"

    @classmethod
    def of(cls, profile: DeviceProfile, workers: int | None = None) -> Technique:
        """Mixed precision, weights and optimizer in fp32: bf16 where it has tensor cores (its range is that of fp32, so
        no gradient is lost), else fp16 with a scaled loss, else fp32; a P4 or P100 gains nothing that is safe from
        fp16. torch's fused AdamW is a CUDA kernel. `workers` replaces the choice."""
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
    """`micro` pairs go through the model at once, `accumulation` times before each step of the optimizer."""

    micro: int
    accumulation: int = 1

    def halved(self) -> Pace:
        """As many pairs a step, half as many at once: half the memory for activations, and fewer counter-examples.
        Raises TrainingFailed when that would leave too few."""
        if self.micro // 2 < SMALLEST_BATCH or self.micro % 2:
            raise TrainingFailed(
                f"memory does not hold {self.micro} pairs at once, and fewer teach nothing, because each pair learns "
                "from the others of its batch: use another card, a smaller model, or shorter texts"
            )
        return Pace(self.micro // 2, self.accumulation * 2)


@dataclass(frozen=True, slots=True)
class Watch:
    """Who looks on. `stop` is asked after each step: true ends the training with a checkpoint."""

    step: Callable[[int, int, float | None], None] = lambda _done, _steps, _loss: None
    """Steps done, steps in all, the last loss that was logged."""
    halved: Callable[[Pace], None] = lambda _pace: None
    stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """`base`: a sentence-transformers folder; `checkpoints`: where they are kept, and found again; `pairs`: query and
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
    """`steps` done in all; `began_at`: the step of the checkpoint that was gone on from, 0 for none; `losses` by step,
    as logged; `stopped`: `Watch.stop` ended it before its last step."""

    steps: int
    began_at: int
    pace: Pace
    losses: dict[int, float]
    stopped: bool

"""The training itself: sentence-transformers' trainer with MultipleNegativesRankingLoss, gone on with from the last
checkpoint after a kill, a Ctrl-C or exhausted memory. No hub, no telemetry, no text in files or logs.
"""

from __future__ import annotations

import gc
import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING

from ..backends import DeviceUnavailable, OutOfMemory
from ..backends.torch.backend import memory_errors_mapped
from ..backends.torch.compute_thread import on_compute_thread
from ..backends.torch.padded import quiet_transformers
from .checkpoints import last_checkpoint, step_of
from .recipe import CHECKPOINTS, LONGEST_BETWEEN, WARMUP, Pace, Trained, TrainingFailed, TrainingJob, Watch

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments

PACKAGES = ("accelerate", "datasets")
"""What sentence-transformers' trainer needs beside the engine's packages (extra `train`)."""


def missing_packages() -> list[str]:
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def train(job: TrainingJob, watch: Watch) -> tuple[SentenceTransformer, Trained]:
    """The trained model, on its device, and what was done. Goes on from the last checkpoint in `job.checkpoints` and
    leaves new ones there. Out of memory, half as many pairs go through the model at once, and it goes on.

    Raises TrainingFailed, DeviceUnavailable.
    """
    _check_device(job)
    if job.profile.kind == "cpu":
        return on_compute_thread(lambda: _train(job, watch))
    return _train(job, watch)


def _train(job: TrainingJob, watch: Watch) -> tuple[SentenceTransformer, Trained]:
    pace = Pace(job.recipe.batch_size)
    while True:
        try:
            with memory_errors_mapped(), quiet_transformers():
                return _attempt(job, pace, watch)
        except OutOfMemory:
            pace = pace.halved()
        # Behind the except block: until here the error held the frames that hold the memory.
        _free()
        watch.halved(pace)


def _check_device(job: TrainingJob) -> None:
    if job.profile.kind == "cuda" and job.profile.index:
        raise DeviceUnavailable(
            f"training computes on the first card that is visible, not on {job.profile.torch_name}: "
            f"set CUDA_VISIBLE_DEVICES={job.profile.index} and device cuda"
        )


def _free() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _attempt(job: TrainingJob, pace: Pace, watch: Watch) -> tuple[SentenceTransformer, Trained]:
    from datasets import Dataset
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    from .pair_trainer import PairTrainer, Progress

    resumed = last_checkpoint(job.checkpoints)
    began_at = 0 if resumed is None else step_of(resumed) or 0
    model = load_model(job.base, job.profile.torch_name)
    pairs = Dataset.from_dict({"anchor": [pair[0] for pair in job.pairs], "positive": [pair[1] for pair in job.pairs]})
    progress = Progress(watch, job.steps)
    trainer = PairTrainer(
        model=model,
        args=_arguments(job, pace),
        train_dataset=pairs,
        loss=MultipleNegativesRankingLoss(model),
        callbacks=[progress],
    )
    trainer.only_our_callbacks()
    try:
        trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    finally:
        trainer.let_go()
    losses = {int(entry["step"]): float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry}
    if not all(map(math.isfinite, losses.values())):
        raise TrainingFailed("the loss is no number any more: begin again with a lower --learning-rate")
    done = trainer.state.global_step
    return model, Trained(done, began_at, pace, losses, stopped=progress.stopped and done < job.steps)


def load_model(folder: Path, device: str) -> SentenceTransformer:
    """In fp32, with its activations computed again in the backward pass instead of kept."""
    import torch
    from sentence_transformers import SentenceTransformer

    with quiet_transformers():
        model = SentenceTransformer(
            str(folder),
            device=device,
            trust_remote_code=False,
            local_files_only=True,
            model_kwargs={"use_safetensors": True, "dtype": torch.float32},
        )
    encoder = getattr(model[0], "auto_model", None)
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):  # the new name and the old
        enable = getattr(encoder, name, None)
        if enable is not None:
            enable()
            break
    return model


def _arguments(job: TrainingJob, pace: Pace) -> SentenceTransformerTrainingArguments:
    from sentence_transformers import SentenceTransformerTrainingArguments
    from sentence_transformers.base.sampler import BatchSamplers

    recipe, technique, steps = job.recipe, job.technique, job.steps
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(job.checkpoints),
        max_steps=steps,
        num_train_epochs=recipe.epochs,
        per_device_train_batch_size=pace.micro,
        gradient_accumulation_steps=pace.accumulation,
        batch_sampler=BatchSamplers.NO_DUPLICATES,
        learning_rate=recipe.learning_rate,
        warmup_steps=math.ceil(WARMUP * steps),
        seed=recipe.seed,
        optim=technique.optimizer,
        fp16=technique.precision == "fp16",
        bf16=technique.precision == "bf16",
        use_cpu=job.profile.kind == "cpu",
        dataloader_num_workers=technique.workers,
        dataloader_pin_memory=technique.pinned,
        save_strategy="steps",
        save_steps=max(1, min(LONGEST_BETWEEN, steps // CHECKPOINTS)),
        save_total_limit=2,
        eval_strategy="no",
        logging_strategy="steps",
        logging_steps=max(1, steps // 50),
        logging_nan_inf_filter=False,
        log_level="error",
        disable_tqdm=True,
        report_to="none",
        push_to_hub=False,
    )
    if job.profile.kind == "cuda":
        arguments._n_gpu = 1  # several visible cards would be used as one, with other batches
    return arguments

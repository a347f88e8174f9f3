"""The training: sentence-transformers' trainer with MultipleNegativesRankingLoss, resumed from the last checkpoint
after a kill, Ctrl-C or exhausted memory. No hub, no telemetry, no texts in files or logs. Imports torch.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentence_transformers
import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import BatchSamplers
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_callback import DefaultFlowCallback

from ..backends import DeviceUnavailable, OutOfMemory
from ..backends.folder import Folder
from ..backends.torch.backend import memory_errors_mapped
from ..backends.torch.encoders import quiet_transformers
from ..backends.torch.process import on_compute_thread
from .recipe import (
    CHECKPOINTS,
    LONGEST_BETWEEN,
    WARMUP,
    Hooks,
    Pace,
    Trained,
    TrainingFailed,
    TrainingJob,
    last_checkpoint,
    step_of,
)

_SCRATCH = "as-saved"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.h5", "*.ot", "*.msgpack")
_NOT_COPIED = shutil.ignore_patterns(".*", "README.md", "provenance.json", "onnx", "openvino", "*.py", *_WEIGHTS)


def train(job: TrainingJob, hooks: Hooks) -> tuple[SentenceTransformer, Trained]:
    """Train, and return the model on its device. Resumes from the last checkpoint in `job.checkpoints` and leaves new
    ones there. Out of memory, it continues with half as many pairs at once.

    Raises TrainingFailed, DeviceUnavailable.
    """
    if job.profile.kind == "cpu":
        return on_compute_thread(lambda: _train(job, hooks))
    if job.profile.index:
        raise DeviceUnavailable(
            f"training uses the first visible card, not {job.profile.torch_name}: "
            f"set CUDA_VISIBLE_DEVICES={job.profile.index} and device cuda"
        )
    return _train(job, hooks)


def _train(job: TrainingJob, hooks: Hooks) -> tuple[SentenceTransformer, Trained]:
    pace = Pace(job.recipe.batch_size)
    while True:
        try:
            with memory_errors_mapped(), quiet_transformers():
                return _attempt(job, pace, hooks)
        except OutOfMemory:
            pace = pace.halved()
        # After the except block: before, the error still holds the frames that hold the memory.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        hooks.halved(pace)


def _attempt(job: TrainingJob, pace: Pace, hooks: Hooks) -> tuple[SentenceTransformer, Trained]:
    from datasets import Dataset

    resumed = last_checkpoint(job.checkpoints)
    began_at = 0 if resumed is None else step_of(resumed) or 0
    model = load_model(job.base, job.profile.torch_name)
    pairs = Dataset.from_dict({"anchor": [pair[0] for pair in job.pairs], "positive": [pair[1] for pair in job.pairs]})
    progress = Progress(hooks, job.steps)
    trainer = PairTrainer(
        model=model,
        args=training_arguments(job, pace),
        train_dataset=pairs,
        loss=MultipleNegativesRankingLoss(model),
        callbacks=[progress],
    )
    trainer.only_our_callbacks()
    try:
        trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    finally:
        trainer.release()
    losses = {int(entry["step"]): float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry}
    if not all(map(math.isfinite, losses.values())):
        raise TrainingFailed("the loss is not finite any more: start again with a lower --learning-rate")
    done = trainer.state.global_step
    return model, Trained(done, began_at, pace, losses, stopped=progress.stopped and done < job.steps)


def load_model(folder: Path, device: str) -> SentenceTransformer:
    """Load in fp32; activations are recomputed in the backward pass instead of kept."""
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


def training_arguments(job: TrainingJob, pace: Pace) -> SentenceTransformerTrainingArguments:
    recipe, technique, steps = job.recipe, job.technique, job.steps
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
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
        arguments._n_gpu = 1  # else several visible cards would compute larger batches together
    return arguments


class Progress(TrainerCallback):
    """Calls the hooks after each step."""

    def __init__(self, hooks: Hooks, steps: int) -> None:
        self._hooks = hooks
        self._steps = steps
        self._loss: float | None = None
        self.stopped = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self._loss = float(logs["loss"])
            if not math.isfinite(self._loss):
                control.should_training_stop = True  # `_attempt` raises the error

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._hooks.step(state.global_step, self._steps, self._loss)
        if self._hooks.stop():
            self.stopped = control.should_save = control.should_training_stop = True


class PairTrainer(SentenceTransformerTrainer):
    """A trainer whose checkpoints contain weights and states, and no texts; without reporters and progress bars."""

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """Add none: it quotes texts of the training and asks the hub about the base model."""

    def only_our_callbacks(self) -> None:
        """Remove every reporter, whatever is installed or set in the environment."""
        self.remove_callback(PrinterCallback)
        for callback in list(self.callback_handler.callbacks):
            ours = type(callback).__module__.startswith("sentence_transformers.")
            if not (ours or isinstance(callback, (Progress, DefaultFlowCallback))):
                self.remove_callback(callback)

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        inner = getattr(loader, "base_dataloader", loader)  # accelerate wraps the loader that starts the workers
        if self.args.dataloader_num_workers:
            inner.worker_init_fn = functools.partial(_ignore_interrupts, inner.worker_init_fn)
        return loader

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(str(folder), create_model_card=False)

    def release(self) -> None:
        """Free the memory, even while an error still references the trainer."""
        self.accelerator.free_memory()
        self.optimizer = self.lr_scheduler = None


def _ignore_interrupts(then: Callable[[int], None] | None, worker: int) -> None:
    """Leave Ctrl-C to the parent. A worker inherits the parent's handlers and its wakeup pipe: the parent would count
    one Ctrl-C several times and stop at once."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    if then is not None:
        then(worker)


def save(model: SentenceTransformer, base: Folder, folder: Path) -> None:
    """Write `folder`, which must not exist. Configuration and tokenizer are copies of the base model's files, so texts
    are read the same way; only the weights are the trained ones, as safetensors."""
    shutil.copytree(base.path, folder, ignore=_NOT_COPIED)
    scratch = folder / _SCRATCH
    with quiet_transformers():
        model.save_pretrained(str(scratch), create_model_card=False, safe_serialization=True)
    ours, theirs = _module_paths(folder), _module_paths(scratch)
    for index, path in theirs.items():
        for file in sorted((scratch / path).glob("*.safetensors*")):
            shutil.move(file, folder / ours[index] / file.name)
    shutil.rmtree(scratch)


def _module_paths(folder: Path) -> dict[int, str]:
    """Return the folder of each module by its number."""
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    return {int(module["idx"]): str(module.get("path", "")) for module in modules}

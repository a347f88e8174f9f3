"""Train with sentence-transformers' trainer and MultipleNegativesRankingLoss; resume from the last checkpoint.

Contacts no hub, sends no telemetry, and writes no texts to files or logs.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import sentence_transformers
import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import BatchSamplers
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import PrinterCallback, TrainerCallback

from ..backends import DeviceUnavailable, OutOfMemory
from ..backends.folder import Folder
from ..backends.torch.encoders import quiet_transformers
from ..backends.torch.process import device_errors_mapped, on_compute_thread
from .recipe import TrainingFailed, TrainingJob, TrainingObserver, last_checkpoint, precision_of

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.h5", "*.ot", "*.msgpack")
_NOT_COPIED = shutil.ignore_patterns(".*", "README.md", "provenance.json", "onnx", "openvino", "*.py", *_WEIGHTS)


def train(job: TrainingJob, observer: TrainingObserver) -> tuple[SentenceTransformer, dict[str, Any]]:
    """Train, and return the model on its device and a summary: `steps` done in all, `began_at` (step of the resumed
    checkpoint, 0 for none), logged `losses` by step, and `stopped` (whether the observer ended the training early).
    Resumes from the last checkpoint in `job.checkpoints`, and writes new ones there. Raises TrainingFailed,
    DeviceUnavailable."""
    if job.profile.kind == "cpu":
        return on_compute_thread(lambda: _train(job, observer))
    if job.profile.index:
        raise DeviceUnavailable(
            f"training uses the first visible card, not {job.profile.torch_name}: "
            f"set CUDA_VISIBLE_DEVICES={job.profile.index} and device cuda"
        )
    return _train(job, observer)


def _train(job: TrainingJob, observer: TrainingObserver) -> tuple[SentenceTransformer, dict[str, Any]]:
    from datasets import Dataset

    resumed, began_at = last_checkpoint(job.checkpoints)
    progress = _Progress(observer, job.steps)
    try:
        with device_errors_mapped(), quiet_transformers():
            model = load_model(job.base, job.profile.torch_name)
            trainer = PairTrainer(
                model=model,
                args=training_arguments(job),
                train_dataset=Dataset.from_dict(
                    {"anchor": [query for query, _ in job.pairs], "positive": [text for _, text in job.pairs]}
                ),
                loss=MultipleNegativesRankingLoss(model),
                callbacks=[progress],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
            trainer.accelerator.free_memory()
    except OutOfMemory:
        raise TrainingFailed(
            f"memory does not hold {job.batch_size} pairs at once: use --batch-size 16, another card, a smaller model, "
            "or shorter texts"
        ) from None
    losses = {int(entry["step"]): float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry}
    if not all(map(math.isfinite, losses.values())):
        raise TrainingFailed("the loss is not finite any more: start again with a lower --learning-rate")
    done = trainer.state.global_step
    stopped = progress.stopped and done < job.steps
    return model, {"steps": done, "began_at": began_at, "losses": losses, "stopped": stopped}


def load_model(folder: Path, device: str) -> SentenceTransformer:
    """Load a model in fp32, with activations recomputed in the backward pass to save memory."""
    with quiet_transformers():
        model = SentenceTransformer(
            str(folder),
            device=device,
            trust_remote_code=False,
            local_files_only=True,
            model_kwargs={"use_safetensors": True, "dtype": torch.float32},
        )
    encoder = getattr(model[0], "auto_model", None)
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):  # new and old name
        enable = getattr(encoder, name, None)
        if enable is not None:
            enable()
            break
    return model


def training_arguments(job: TrainingJob) -> SentenceTransformerTrainingArguments:
    precision = precision_of(job.profile)
    on_card = job.profile.kind == "cuda"
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        output_dir=str(job.checkpoints),
        max_steps=job.steps,
        num_train_epochs=job.epochs,
        per_device_train_batch_size=job.batch_size,
        batch_sampler=BatchSamplers.NO_DUPLICATES,
        learning_rate=job.learning_rate,
        warmup_steps=math.ceil(job.steps / 10),  # then the learning rate falls linearly
        seed=job.seed,
        optim="adamw_torch_fused" if on_card else "adamw_torch",
        fp16=precision == "fp16",
        bf16=precision == "bf16",
        use_cpu=not on_card,
        dataloader_pin_memory=on_card,
        save_strategy="steps",
        save_steps=max(1, min(500, job.steps // 10)),
        save_total_limit=2,
        eval_strategy="no",
        logging_strategy="steps",
        logging_steps=max(1, job.steps // 50),
        logging_nan_inf_filter=False,
        log_level="error",
        disable_tqdm=True,
        report_to="none",
        push_to_hub=False,
    )
    if on_card:
        arguments._n_gpu = 1  # else several visible cards would share larger batches
    return arguments


class _Progress(TrainerCallback):
    """Call the observer after each step."""

    def __init__(self, observer: TrainingObserver, steps: int) -> None:
        self._observer = observer
        self._steps = steps
        self._loss: float | None = None
        self.stopped = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self._loss = float(logs["loss"])
            if not math.isfinite(self._loss):
                control.should_training_stop = True  # `_train` raises the error

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._observer.step(state.global_step, self._steps, self._loss)
        if self._observer.stop():
            self.stopped = control.should_save = control.should_training_stop = True


class PairTrainer(SentenceTransformerTrainer):
    """A trainer whose checkpoints contain weights and states, but no texts."""

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """Add no model card: it would quote training texts and query the hub."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(str(folder), create_model_card=False)


def save(model: SentenceTransformer, base: Folder, folder: Path) -> None:
    """Write the model to `folder`, which must not exist yet: the trained weights as safetensors, copies of the base
    model's configuration and tokenizer files, and the prompts of the training."""
    shutil.copytree(base.path, folder, ignore=_NOT_COPIED)
    file = folder / "config_sentence_transformers.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    before = config.get("prompts") or {}
    # Settings may have replaced prompts, and sentence-transformers 6 uses no "passage" without "document".
    older = {role: base.document_prompt for role in ("passage", "corpus") if role in before}
    prompts = before | older | {"query": base.query_prompt, "document": base.document_prompt}
    if {**dict.fromkeys(prompts, ""), **before} != prompts:
        file.write_text(json.dumps(config | {"prompts": prompts}, indent=2, ensure_ascii=False), encoding="utf-8")
    scratch = folder / "as-saved"
    with quiet_transformers():
        model.save_pretrained(str(scratch), create_model_card=False, safe_serialization=True)
    ours, theirs = _module_paths(folder), _module_paths(scratch)
    for index, path in theirs.items():
        for file in sorted((scratch / path).glob("*.safetensors*")):
            shutil.move(file, folder / ours[index] / file.name)
    shutil.rmtree(scratch)


def _module_paths(folder: Path) -> dict[int, str]:
    """Return the folder of each module, by its index."""
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    return {int(module["idx"]): str(module.get("path", "")) for module in modules}

"""sentence-transformers' trainer without what does not belong here: model cards that quote the texts, progress bars on
stdout, pickled arguments, workers that take a Ctrl-C for themselves. Imports sentence-transformers; is imported late.
"""

from __future__ import annotations

import functools
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformerTrainer
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_callback import DefaultFlowCallback

from .recipe import Watch


class Progress(TrainerCallback):
    """Tells a `Watch`, and asks it after each step whether to stop."""

    def __init__(self, watch: Watch, steps: int) -> None:
        self._watch = watch
        self._steps = steps
        self._loss: float | None = None
        self.stopped = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self._loss = float(logs["loss"])
            if not math.isfinite(self._loss):
                control.should_training_stop = True  # `train` says why

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._watch.step(state.global_step, self._steps, self._loss)
        if self._watch.stop():
            self.stopped = control.should_save = control.should_training_stop = True


class PairTrainer(SentenceTransformerTrainer):
    """A trainer of pairs whose checkpoints hold weights and states, and nothing of the texts."""

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """None: it picks texts of the training as examples and asks the hub about the base model."""

    def only_our_callbacks(self) -> None:
        """Beside the loop's own: no reporter, whatever is installed and whatever the environment says."""
        self.remove_callback(PrinterCallback)
        kept = (Progress, DefaultFlowCallback)
        for callback in list(self.callback_handler.callbacks):
            ours = type(callback).__module__.startswith("sentence_transformers.")
            if not (ours or isinstance(callback, kept)):
                self.remove_callback(callback)

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        inner = getattr(loader, "base_dataloader", loader)  # accelerate's wraps the one that starts the workers
        if self.args.dataloader_num_workers:
            inner.worker_init_fn = functools.partial(_leave_signals_to_the_parent, inner.worker_init_fn)
        return loader

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(str(folder), create_model_card=False)

    def let_go(self) -> None:
        """Of what holds memory, whoever still holds the trainer through an error."""
        self.accelerator.free_memory()
        self.optimizer = self.lr_scheduler = None


def _leave_signals_to_the_parent(then: Callable[[int], None] | None, worker: int) -> None:
    """A Ctrl-C reaches every process of the terminal. A worker inherits the parent's handlers, and the pipe that tells
    the parent of signals: it would be told of one Ctrl-C several times, and end at once."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    if then is not None:
        then(worker)

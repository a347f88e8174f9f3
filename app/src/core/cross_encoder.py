"""A cross-encoder from a folder, which scores how well a text answers a query. Offline, safetensors, no model code."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .backends import ModelNotFound, ModelUnsupported, OutOfMemory
from .device import DeviceProfile, Precision, choose_precision
from .memory import MemoryLimits

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder

_BATCH = 32  # pairs; fewer where memory does not hold them
_log = logging.getLogger(__name__)


def check_folder(folder: Path) -> None:
    """Check a folder without loading. Raises ModelNotFound, ModelUnsupported."""
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"cross-encoder {folder.name!r}: no folder with a config.json")
    if not (folder / "model.safetensors").is_file() and not (folder / "model.safetensors.index.json").is_file():
        raise ModelUnsupported(
            f"cross-encoder {folder.name!r} has no model.safetensors; pickled weights are not loaded"
        )


class _Turns:
    """A lock that threads get in the order in which they ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.asked: deque[threading.Event] = deque()  # the first one's thread has the lock

    def __enter__(self) -> None:
        mine = threading.Event()
        with self._lock:
            self.asked.append(mine)
            self.asked[0].set()
        mine.wait()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.asked.popleft()
            if self.asked:
                self.asked[0].set()


class CrossEncoding:
    """A loaded cross-encoder. Thread-safe: one batch is computed at a time; concurrent calls take turns."""

    def __init__(self, folder: Path, profile: DeviceProfile, limits: MemoryLimits, precision: str = "auto") -> None:
        """Load a folder onto a device and hold its memory there. `precision` auto: the device's, as for an engine.
        Raises ModelNotFound, ModelUnsupported, OutOfMemory, DeviceFailed."""
        check_folder(folder)
        from .backends.torch.linears import bf16_gain

        self._turns = _Turns()
        self._folder, self._profile, self._limits = folder, profile, limits
        self._load(choose_precision(profile, precision, bf16_gain)[0])
        numbers = self._model.num_labels
        if numbers != 1:
            raise ModelUnsupported(
                f"cross-encoder {folder.name!r} gives {numbers} numbers a text; a reranker gives one"
            )

    def _load(self, precision: Precision) -> None:
        from safetensors import SafetensorError
        from sentence_transformers import CrossEncoder

        from .backends.torch.encoders import Target, quiet_transformers
        from .backends.torch.process import device_errors_mapped, limited_memory, reserved_bytes

        profile, dtype = self._profile, Target(self._profile, precision).dtype
        with quiet_transformers(), device_errors_mapped(profile.index):
            memory = limited_memory(profile, self._limits)
            before = reserved_bytes(profile)
            try:
                model = CrossEncoder(
                    str(self._folder),
                    device=profile.torch_name,
                    local_files_only=True,
                    trust_remote_code=False,
                    model_kwargs={"use_safetensors": True, "dtype": dtype},
                )
            except (ValueError, KeyError, OSError, SafetensorError) as error:
                fault = f"cross-encoder {self._folder.name!r} cannot be loaded: {type(error).__name__}"
                raise ModelUnsupported(fault) from error
            memory.hold(model, max(0, reserved_bytes(profile) - before))
        self._model: CrossEncoder = model
        self.precision = precision

    def scores(self, query: str, texts: Sequence[str], check: Callable[[], object] = lambda: None) -> list[float]:
        """Return the score of each text; higher is better, the scale depends on the model. Calls `check` before each
        batch; its error ends the call. Raises OutOfMemory if a single text does not fit, DeviceFailed.

        Computes in batches of similar length, the longest first; a batch that runs out of memory is halved. A model
        that overflows in half precision is loaded in fp32 once and for all.
        """
        from .backends.torch.process import device_errors_mapped

        found, size = np.empty(len(texts), dtype=np.float32), _BATCH
        left = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
        while left:
            some = left[:size]
            pairs = [(query, texts[place]) for place in some]
            with self._turns:  # for one batch: a call with many texts does not hold up one with few
                check()
                try:
                    with device_errors_mapped(self._profile.index):
                        found[some] = self._model.predict(pairs, batch_size=size, show_progress_bar=False)
                except OutOfMemory as error:
                    if len(some) == 1:
                        fault = f"the memory of {self._profile.name} does not hold one text for the cross-encoder"
                        raise OutOfMemory(f"{fault} {self._folder.name!r}") from error
                    size = len(some) // 2
                    continue
                if self.precision in ("fp16", "bf16") and not np.isfinite(found[some]).all():
                    _log.warning("cross-encoder %r overflows in %s: loaded in fp32", self._folder.name, self.precision)
                    self._load("fp32")
                    continue
            left = left[size:]
        return [float(score) for score in found]

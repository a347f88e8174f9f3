"""The ONNX Runtime backend: runs a sentence encoder's graph (from `onnx_export`) over padded rectangles."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..device import DeviceProfile, Precision
from ..tokens import rectangle, width_of
from . import DeviceFailed, DeviceUnavailable, OutOfMemory, Pause, TokenBatch, Vectors
from .folder import Folder
from .tokenizing import RustTokenizer, TokenizingBackend, model_info

PATH = "onnx-runtime"
OUTPUT = "sentence_embedding"
_NO_MEMORY = ("out of memory", "failed to allocate", "bad_alloc", "bad allocation", "not enough memory")
# Errors of the CUDA runtime that each later call repeats (driver_types.h): ECC and NVLink, illegal address or
# instruction, time limit, assertion, misaligned address, launch failure, unknown.
_FAILED = re.compile(r"CUDA failure (214|220|700|702|710|71[4-9]|999)\b")


@dataclass(eq=False)
class OnnxRuntimeBackend(TokenizingBackend):
    """One graph, on one device, of a model whose files are verified (`weights`: their SHA-256).

    The onnxruntime session `usual` computes batches; `exact` returns a session for the fp32 graph, possibly `usual`.
    `note`: where the sessions run, for messages; `most_texts`: largest batch, if the session has a limit; `variant`:
    see ModelInfo.
    """

    folder: Folder
    weights: str
    profile: DeviceProfile
    precision: Precision
    precision_reason: str
    usual: Any
    exact: Callable[[], Any]
    note: str = ""
    most_texts: int | None = None
    variant: str = ""

    def __post_init__(self) -> None:
        self._tokenizer = RustTokenizer.load(self.folder)
        self._exact: Any = None
        with loading_errors_mapped():
            dimension = self.forward(self._tokenizer.ids([""])).shape[1]
        self.info = replace(
            model_info(self.folder, self._tokenizer, self.weights, dimension),
            precision=self.precision,
            precision_reason=self.precision_reason,
            path=PATH,
            path_reason=self.note,
            variant=self.variant,
        )

    def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
        """Return the vectors; compute them in parts if the batch has more texts than the session allows."""
        if self.usual is None:
            raise RuntimeError("the backend is closed")
        if exact and self._exact is None:
            self._exact = self.exact()
        session, most = self._exact if exact else self.usual, self.most_texts or len(batch)
        pad_id, parts = int(self.folder.config.get("pad_token_id") or 0), []
        multiple = self.profile.padding_multiple(self.precision)
        for start in range(0, len(batch), most):
            part = batch.select(range(start, min(start + most, len(batch))))
            width = width_of(part, multiple, self.folder.max_length)
            ids, mask = rectangle(part, width=width, pad_id=pad_id)
            try:
                (vectors,) = session.run([OUTPUT], {"input_ids": ids, "attention_mask": mask})
            except Exception as error:  # ONNX Runtime's errors share no other base class
                if _no_memory(error):
                    raise OutOfMemory("this batch does not fit in the device's memory") from error
                if _FAILED.search(str(error)):
                    raise DeviceFailed.after(error) from error
                raise
            parts.append(np.asarray(vectors, dtype=np.float32))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def used_bytes(self) -> int:
        """Return the size of the files with weights: ONNX Runtime does not tell what its sessions take."""
        return sum(file.stat().st_size for file in self.folder.weights) if self.profile.kind == "cuda" else 0

    def close(self) -> None:
        super().close()
        self.usual = self._exact = None
        self.exact = lambda: None  # it may also hold the session


def make_session(
    graph: bytes | Path, providers: Sequence[tuple[str, Mapping[str, Any]]], threads: int | None = None
) -> Any:
    """Return a session with all of these providers. Raises OutOfMemory, and DeviceUnavailable for a missing provider,
    which ONNX Runtime only logs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised, and missing providers are reported below
    options.add_session_config_entry("session.x64quantprecision", "1")  # without VNNI, sums of int8 would saturate
    if threads is not None:
        options.intra_op_num_threads = threads
    with loading_errors_mapped():
        session = onnxruntime.InferenceSession(
            graph if isinstance(graph, bytes) else str(graph), options, providers=[(n, dict(o)) for n, o in providers]
        )
    missing = [name for name, _ in providers if name not in session.get_providers()]
    if missing:
        raise DeviceUnavailable(
            f"ONNX Runtime {onnxruntime.__version__} cannot use {missing[0]} here: a library that it needs is missing"
            " or has the wrong version (docs/gpu.md)"
        )
    return session


@contextlib.contextmanager
def loading_errors_mapped() -> Iterator[None]:
    """Raise ONNX Runtime's errors as DeviceUnavailable or OutOfMemory while a session is created and first run."""
    try:
        yield
    except Exception as error:
        if _no_memory(error):
            raise OutOfMemory("this graph does not fit in the device's memory") from error
        if type(error).__module__.startswith("onnxruntime."):
            said = str(error).partition("\n")[0] or type(error).__name__
            raise DeviceUnavailable(f"ONNX Runtime cannot load the graph: {said}") from error
        raise


def _no_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY)

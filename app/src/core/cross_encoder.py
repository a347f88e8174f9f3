"""A cross-encoder from a folder: reads a query and a text together and says how well the one answers the other. Knows
sentence-transformers; no store, no search. Offline only, safetensors only, never code from a model's folder.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .backends import ModelNotFound, ModelUnsupported

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder

_BATCH = 32


def check_folder(folder: Path) -> None:
    """Loads nothing. Raises ModelNotFound, ModelUnsupported."""
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"cross-encoder {folder.name!r}: no folder with a config.json")
    if not (folder / "model.safetensors").is_file() and not (folder / "model.safetensors.index.json").is_file():
        raise ModelUnsupported(
            f"cross-encoder {folder.name!r} has no model.safetensors; pickled weights are not loaded"
        )


class CrossEncoding:
    """Thread-safe: one call computes at a time."""

    def __init__(self, folder: Path, device: str) -> None:
        """`device` as torch names it. Raises ModelNotFound, ModelUnsupported."""
        check_folder(folder)
        self._lock = threading.Lock()
        self._model = _loaded(folder, device)

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """Of each text; more is better, the scale is the model's own."""
        with self._lock:
            found = self._model.predict(
                [(query, text) for text in texts], batch_size=_BATCH, show_progress_bar=False, convert_to_numpy=True
            )
        return [float(score) for score in found]


def _loaded(folder: Path, device: str) -> CrossEncoder:
    from safetensors import SafetensorError
    from sentence_transformers import CrossEncoder

    from .backends.torch.encoders import quiet_transformers

    with quiet_transformers():
        try:
            model: CrossEncoder = CrossEncoder(
                str(folder),
                device=device,
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs={"use_safetensors": True},
            )
        except (ValueError, KeyError, OSError, SafetensorError) as error:
            raise ModelUnsupported(f"cross-encoder {folder.name!r} cannot be loaded: {type(error).__name__}") from error
    if model.num_labels != 1:
        raise ModelUnsupported(
            f"cross-encoder {folder.name!r} gives {model.num_labels} numbers a text; a reranker gives one"
        )
    return model

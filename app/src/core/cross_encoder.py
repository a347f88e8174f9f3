"""A cross-encoder from a folder, which scores how well a text answers a query. Offline, safetensors, no model code."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from .backends import ModelNotFound, ModelUnsupported

_BATCH = 32


def check_folder(folder: Path) -> None:
    """Check a folder without loading. Raises ModelNotFound, ModelUnsupported."""
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"cross-encoder {folder.name!r}: no folder with a config.json")
    if not (folder / "model.safetensors").is_file() and not (folder / "model.safetensors.index.json").is_file():
        raise ModelUnsupported(
            f"cross-encoder {folder.name!r} has no model.safetensors; pickled weights are not loaded"
        )


class CrossEncoding:
    """A loaded cross-encoder. Thread-safe: one call computes at a time."""

    def __init__(self, folder: Path, device: str) -> None:
        """Load a folder onto `device`, named as in torch. Raises ModelNotFound, ModelUnsupported."""
        check_folder(folder)
        from safetensors import SafetensorError
        from sentence_transformers import CrossEncoder

        from .backends.torch.encoders import quiet_transformers

        self._lock = threading.Lock()
        with quiet_transformers():
            try:
                self._model: CrossEncoder = CrossEncoder(
                    str(folder),
                    device=device,
                    local_files_only=True,
                    trust_remote_code=False,
                    model_kwargs={"use_safetensors": True},
                )
            except (ValueError, KeyError, OSError, SafetensorError) as error:
                fault = f"cross-encoder {folder.name!r} cannot be loaded: {type(error).__name__}"
                raise ModelUnsupported(fault) from error
        numbers = self._model.num_labels
        if numbers != 1:
            raise ModelUnsupported(
                f"cross-encoder {folder.name!r} gives {numbers} numbers a text; a reranker gives one"
            )

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """Return the score of each text; higher is better, the scale depends on the model."""
        pairs = [(query, text) for text in texts]
        with self._lock:
            found = self._model.predict(pairs, batch_size=_BATCH, show_progress_bar=False, convert_to_numpy=True)
        return [float(score) for score in found]

"""A trained model as a folder that the engine loads by its path: the base model's files, with the trained weights in
place of its own. Knows no training and no pairs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ..backends.folder import Folder
from ..backends.torch.padded import quiet_transformers

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_SCRATCH = "as-saved"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.h5", "*.ot", "*.msgpack")
_NOT_COPIED = shutil.ignore_patterns(".*", "README.md", "provenance.json", "onnx", "openvino", "*.py", *_WEIGHTS)


def save(model: SentenceTransformer, base: Folder, folder: Path) -> None:
    """Write `folder`, which must not be there. Configuration and tokenizer are the base model's own files, byte for
    byte, so nothing about how texts are read can have changed; only weights are the model's, as safetensors."""
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
    """By the number of the module, its folder."""
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    return {int(module["idx"]): str(module.get("path", "")) for module in modules}

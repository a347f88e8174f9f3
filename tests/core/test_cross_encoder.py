"""A tiny cross-encoder with random weights, from its folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.src.core.backends import ModelNotFound, ModelUnsupported
from app.src.core.cross_encoder import CrossEncoding
from app.src.core.device import DeviceProfile
from app.src.core.memory import MemoryLimits

MINILM = "all-MiniLM-L6-v2"
CPU = DeviceProfile.cpu()


def test_a_cross_encoder_from_a_folder(tmp_path: Path) -> None:
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    from app.src.core.backends.folder import find_folder

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    for name, labels in (("one", 1), ("three", 3)):
        configuration = BertConfig.from_dict(shape | {"num_labels": labels})
        BertForSequenceClassification(configuration).save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(find_folder(MINILM)).save_pretrained(tmp_path / name)
    model = CrossEncoding(tmp_path / "one", CPU, MemoryLimits())
    texts = ["oil pump", "garden hose", "chair"]
    scores = model.scores("a pump", texts)
    assert np.isfinite(scores).all()
    assert model.scores("a pump", texts[::-1]) == pytest.approx(scores[::-1], abs=1e-5)
    with pytest.raises(ModelUnsupported, match="gives 3 numbers a text"):
        CrossEncoding(tmp_path / "three", CPU, MemoryLimits())
    (tmp_path / "one" / "model.safetensors").rename(tmp_path / "one" / "pytorch_model.bin")
    with pytest.raises(ModelUnsupported, match="pickled"):
        CrossEncoding(tmp_path / "one", CPU, MemoryLimits())
    with pytest.raises(ModelNotFound):
        CrossEncoding(tmp_path / "none", CPU, MemoryLimits())

"""Vectors of single tokens: their mean is the text's vector; late interaction worked out by hand; a tiny cross-encoder
with random weights, from its folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.src.core.backends import ModelNotFound, ModelUnsupported
from app.src.core.backends.pytorch import TorchBackend, TorchOptions
from app.src.core.cross_encoder import CrossEncoding
from app.src.core.engine import EmbeddingEngine
from app.src.core.late_interaction import late_interaction, max_similarity
from app.src.core.loading import EngineOptions, load_engine

MINILM = "all-MiniLM-L6-v2"


def test_by_hand() -> None:
    asked = np.array([[1, 0], [0, 2]], np.float32)
    held = [np.array([[3, 0]], np.float32), np.array([[0, 1], [1, 1]], np.float32), np.zeros((1, 2), np.float32)]
    assert max_similarity(asked, held) == pytest.approx([0.5, (np.sqrt(0.5) + 1) / 2, 0.0])
    assert max_similarity(asked, [asked]) == pytest.approx([1.0])


@pytest.mark.parametrize("packed", [True, False])
def test_words_have_vectors_and_special_tokens_none(packed: bool) -> None:
    backend = TorchBackend.load(TorchOptions(MINILM, precision="fp32", device="cpu", packed=packed))
    with EmbeddingEngine(backend) as engine:
        texts = ["a longer text about an oil pump that leaks", "pump", ""]
        found = engine.token_vectors(texts)
        counted = engine.count_tokens(texts)
        assert [len(each) for each in found[:2]] == counted[:2], "in the order of the texts"
        assert len(found[2]) == 2, "nothing else is there"
        assert found[2].mean(axis=0) == pytest.approx(engine.embed([""], normalize=False)[0], abs=1e-4)
        scores = late_interaction(engine, "leaking pump", [*texts[:2], "birthday cake"])
        assert scores[2] < min(scores[:2])
        assert late_interaction(engine, "oil pump", ["oil pump"]) == pytest.approx([1.0], abs=1e-5)
        assert late_interaction(engine, "oil", []) == []


def test_what_has_no_tokens_says_so() -> None:
    with (
        load_engine(EngineOptions(model="hash:64")) as engine,
        pytest.raises(ModelUnsupported, match="no vectors of its"),
    ):
        engine.token_vectors(["pump"])


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
    model = CrossEncoding(tmp_path / "one", "cpu")
    texts = ["oil pump", "garden hose", "chair"]
    scores = model.scores("a pump", texts)
    assert np.isfinite(scores).all()
    assert model.scores("a pump", texts[::-1]) == pytest.approx(scores[::-1], abs=1e-5)
    with pytest.raises(ModelUnsupported, match="gives 3 numbers a text"):
        CrossEncoding(tmp_path / "three", "cpu")
    (tmp_path / "one" / "model.safetensors").rename(tmp_path / "one" / "pytorch_model.bin")
    with pytest.raises(ModelUnsupported, match="pickled"):
        CrossEncoding(tmp_path / "one", "cpu")
    with pytest.raises(ModelNotFound):
        CrossEncoding(tmp_path / "none", "cpu")

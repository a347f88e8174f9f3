"""Every architecture the packed path knows gives the vectors of transformers' own modules: all lengths, batch orders
and precisions, odd texts, texts that spell out the padding token. Small models with random weights, norms and biases.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.src.core.backends import TokenBatch
from app.src.core.backends.folder import Folder, read_folder
from app.src.core.backends.torch import architectures
from app.src.core.backends.torch.architectures import refusal
from app.src.core.backends.torch.encoders import PaddedEncoder, Target
from app.src.core.backends.torch.packed import PackedEncoder
from app.src.core.device import DeviceProfile
from app.src.core.loading import EngineOptions, load_engine
from tests.core.conftest import module, write
from tests.core.test_pytorch import ODD, WORDS

LONGEST = 48
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
COMMON = {"vocab_size": 30522, "max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", **SIZES, **COMMON},
    "roberta": {"model_type": "roberta", "pad_token_id": 1, **SIZES, **COMMON},
    "roberta that pads with 0": {"model_type": "roberta", "pad_token_id": 0, **SIZES, **COMMON},
    "xlm-roberta": {"model_type": "xlm-roberta", "pad_token_id": 1, **SIZES, **COMMON},
    "camembert": {"model_type": "camembert", "pad_token_id": 1, **SIZES, **COMMON},
    "distilbert": {"model_type": "distilbert", "dim": 32, "hidden_dim": 64, "n_heads": 4, "n_layers": 3, **COMMON},
}
CPU = Target(DeviceProfile.cpu(), "fp32")


def save(path: Path, tokenizer: Path, config: dict[str, Any], pooling: str = "mean") -> Path:
    """A sentence-transformers folder of this architecture."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(7)
    settings = dict(config)
    make: Any = AutoModel.from_config
    model = make(AutoConfig.for_model(settings.pop("model_type"), **settings)).eval()
    with torch.no_grad():
        for name, numbers in model.named_parameters():
            numbers.normal_(1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0, 0.25)
    model.save_pretrained(path)
    for file in ("tokenizer.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(tokenizer / file, path / file)
    write(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"})
    write(path / "sentence_bert_config.json", {"max_seq_length": LONGEST, "do_lower_case": False})
    write(path / "modules.json", [module(number, kind) for number, kind in enumerate(("Transformer", "Pooling"))])
    (path / "1_Pooling").mkdir()
    write(path / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, "pooling_mode": pooling})
    return path


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Callable[[str], Path]:
    """The folder of one of MODELS, made when first asked for."""
    root = tmp_path_factory.mktemp("architectures")

    def get(name: str) -> Path:
        path = root / name.replace(" ", "-")
        return path if path.exists() else save(path, minilm_folder, MODELS[name])

    return get


def sequences(padding: int = 0) -> TokenBatch:
    """Every length from 1 to the longest, in random order, some twice; the padding token now and then inside."""
    rng = random.Random(11)
    lengths = [*range(1, LONGEST + 1), 7, 7, 7, LONGEST]
    rng.shuffle(lengths)
    return TokenBatch.of(
        [rng.choice([padding, 1, 100]) if rng.random() < 0.05 else rng.randrange(999, 29_000) for _ in range(length)]
        for length in lengths
    )


def least_cosine(ours: Any, theirs: Any) -> float:
    return float(torch.nn.functional.cosine_similarity(ours.double(), theirs.double()).min())


def rare(*known: str) -> list[Any]:
    """The models, all but those named here in the slow suite alone."""
    return [name if name in known else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pooling", ["mean", pytest.param("cls", marks=pytest.mark.slow)])
def test_every_length_and_order_in_fp32(saved: Callable[[str], Path], name: str, pooling: str) -> None:
    folder = replace(read_folder(saved(name), "tiny"), pooling=pooling)
    assert refusal(folder) is None
    encoder, reference = PackedEncoder.load(folder, DeviceProfile.cpu(), torch.float32), PaddedEncoder(folder, CPU)
    batch = sequences()
    with torch.inference_mode():
        wanted = torch.cat([reference(batch.select([place])) for place in range(len(batch))])
        for order in (list(range(len(batch))), sorted(range(len(batch)), key=lambda place: -len(batch[place]))):
            found = encoder(batch.select(order))
            assert least_cosine(found, wanted[order]) >= 0.999999
            torch.testing.assert_close(found, wanted[order], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", rare("bert"))
def test_bf16_is_near(saved: Callable[[str], Path], name: str) -> None:
    """As near as transformers' own modules come in bf16: these weights are wilder than any trained model's."""
    folder = read_folder(saved(name), "tiny")
    batch = sequences()
    with torch.inference_mode():
        exact = PaddedEncoder(folder, CPU)(batch)
        ours = least_cosine(PackedEncoder.load(folder, DeviceProfile.cpu(), torch.bfloat16)(batch), exact)
        theirs = least_cosine(PaddedEncoder(folder, Target(DeviceProfile.cpu(), "bf16"))(batch), exact)
    assert 1 - ours <= 2.5 * (1 - theirs) + 1e-3, (ours, theirs)
    assert ours >= 0.98


@pytest.mark.parametrize("name", rare("bert", "roberta"))
def test_the_engine_runs_it_packed_with_the_vectors_of_sentence_transformers(
    saved: Callable[[str], Path], name: str
) -> None:
    from sentence_transformers import SentenceTransformer

    folder = saved(name)
    rng = random.Random(3)
    texts = [
        *ODD,
        *(" ".join(rng.choice(WORDS) for _ in range(length)) for length in range(1, 60, 4)),
        "[PAD] oil [PAD]",
    ]
    theirs = SentenceTransformer(str(folder), device="cpu").encode(texts, normalize_embeddings=True, batch_size=7)
    with load_engine(EngineOptions(str(folder), device="cpu", precision="fp32")) as engine:
        assert (engine.path, engine.max_tokens) == ("packed", LONGEST - 2)
        assert "self-test" in engine.path_reason
        assert np.einsum("ij,ij->i", engine.embed(texts), theirs).min() >= 0.99999
    with load_engine(EngineOptions(str(folder), device="cpu", precision="bf16")) as engine:
        assert engine.path == "packed", engine.path_reason
        assert np.einsum("ij,ij->i", engine.embed(texts), theirs).min() >= 0.98


def damaged(name: str) -> Callable[[Any, Any], Any]:
    """A reader that misunderstands one thing."""

    def read(folder: Any, tensors: Any) -> Any:
        weights = architectures.read(folder, tensors)
        wrong: dict[str, dict[str, Any]] = {
            "positions": {"positions": weights.positions * 0},
            "order of counting": {"padding_id": 5 if weights.padding_id is None else None},
            "a layer": {"layers": weights.layers[:-1]},
            "epsilon": {"epsilon": 0.5},
            "heads": {"heads": 2},
        }
        return replace(weights, **wrong[name])

    return read


@pytest.mark.parametrize(
    ("model", "misunderstood"),
    [
        *(("bert", wrong) for wrong in ("positions", "a layer", "epsilon", "heads")),
        ("roberta", "order of counting"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_what_is_misunderstood_falls_back_and_says_so(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, model: str, misunderstood: str, precision: str
) -> None:
    monkeypatch.setattr("app.src.core.backends.torch.packed.read", damaged(misunderstood))
    with load_engine(EngineOptions(str(saved(model)), device="cpu", precision=precision)) as engine:
        assert engine.path == "padded"
        assert "differ from those of Transformers" in engine.path_reason
        assert engine.embed(["oil leak"]).shape == (1, 32)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.fixture
def folder(minilm_folder: Path) -> Folder:
    return read_folder(minilm_folder, "all-MiniLM-L6-v2")


def test_plain_bert_is_known(folder: Folder) -> None:
    assert refusal(folder) is None


@pytest.mark.parametrize(
    ("difference", "says"),
    [
        ({"model_type": "deberta-v2"}, "deberta-v2 is not one of bert, roberta"),
        ({"model_type": None}, "None is not one of"),
        ({"hidden_act": "gelu_new"}, "gelu_new, not gelu"),
        ({"position_embedding_type": "relative_key"}, "relative_key, not absolute"),
        ({"is_decoder": True}, "decoder"),
        ({"model_type": "distilbert", "activation": "relu"}, "relu, not gelu"),
        ({"model_type": "mpnet"}, "mpnet is not one of"),
        ({"model_type": "modernbert"}, "modernbert is not one of"),
    ],
    ids=str,
)
def test_anything_else_is_refused_with_its_reason(folder: Folder, difference: dict[str, Any], says: str) -> None:
    assert says in str(refusal(replace(folder, config=folder.config | difference)))


def test_other_modules_are_refused(folder: Folder) -> None:
    assert "mean or CLS pooling" in str(refusal(replace(folder, pooling="")))

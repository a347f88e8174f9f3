"""Engines and model folders for the tests of the core."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.core.backends import Backend, ModelInfo, OutOfMemory, Pause, TokenBatch, Vectors
from app.src.core.backends.folder import find_folder
from app.src.core.backends.hashing import HashingBackend, words_of
from app.src.core.device import DeviceProfile
from app.src.core.engine import EmbeddingEngine, Engine
from app.src.core.loading import EngineOptions, load_engine
from app.src.core.onnx_export.serving import GraphOptions
from app.src.core.tokens import plan_batches

# On a machine that the package does not reach, the folder of one (scripts/gpu-proof).
MINILM = os.environ.get("OWL_TEST_MINILM", "all-MiniLM-L6-v2")
TINY = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "hidden_act": "gelu",
    "max_position_embeddings": 64,
    "vocab_size": 30522,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def _needs_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")


@pytest.fixture(autouse=True)
def _devices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier test left on a simulated card takes no memory of this one's."""
    monkeypatch.setattr("app.src.core.memory._devices", {})


class ScriptedBackend(Backend):
    """A hashing backend that records the words of its batches and fails as told."""

    def __init__(self, most_tokens: int | None = None) -> None:
        self._inner = HashingBackend("hash:32")
        self.most_tokens = most_tokens
        self.info: ModelInfo = self._inner.info
        self.profile: DeviceProfile = self._inner.profile
        self.batches: list[list[list[str]]] = []
        self.exact_rows = 0
        self.closed = 0
        self.spoil: Callable[[list[str], bool], float | None] = lambda _tokens, _exact: None

    def tokenize(self, texts: Sequence[str]) -> TokenBatch:
        return self._inner.tokenize(texts)

    def count(self, texts: Sequence[str]) -> list[int]:
        return self._inner.count(texts)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        return self._inner.offsets(text)

    def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
        if self.most_tokens is not None and batch.tokens > self.most_tokens:
            raise OutOfMemory("scripted")
        self.batches.append(words_by_text(batch))
        self.exact_rows += len(batch) * exact
        vectors = np.array(self._inner.forward(batch))
        for row, tokens in enumerate(self.batches[-1]):
            value = self.spoil(tokens, exact)
            if value is not None:
                vectors[row] = value
        return vectors

    def close(self) -> None:
        self.closed += 1


def words_by_text(batch: TokenBatch) -> list[list[str]]:
    """Return the tokens of each text of a hashing model's batch."""
    words = iter(words_of(batch))
    return [list(islice(words, length)) for length in batch.lengths.tolist()]


def batches_of(lengths: Sequence[int], budget: int, multiple: int = 8, *, packed: bool = False) -> list[list[int]]:
    """The plan as lists, to be compared."""
    return [batch.tolist() for batch in plan_batches(lengths, budget, multiple, packed=packed)]


@pytest.fixture
def scripted() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def engine(scripted: ScriptedBackend) -> Iterator[EmbeddingEngine]:
    with EmbeddingEngine(scripted) as engine:
        yield engine


@pytest.fixture(scope="session")
def minilm() -> Iterator[Engine]:
    """The packaged model, as it is used on a CPU."""
    with load_engine(EngineOptions(MINILM, device="cpu", precision="fp32")) as engine:
        yield engine


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    return find_folder(MINILM)


@pytest.fixture(scope="session")
def sentence_transformer(minilm_folder: Path) -> Any:
    """The reference for all vectors."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(minilm_folder), device="cpu")


MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path, minilm_folder: Path) -> MakeFolder:
    return functools.partial(make_tiny_folder, tmp_path, minilm_folder)


@pytest.fixture
def folder(make_folder: MakeFolder) -> Path:
    """A tiny model's folder."""
    return make_folder()


@pytest.fixture
def options(tmp_path: Path) -> GraphOptions:
    """An empty cache of calibrations, which are wanted."""
    return GraphOptions(tmp_path / "cache", enabled=True)


def make_tiny_folder(
    place: Path,
    tokenizer: Path,
    name: str = "tiny",
    *,
    pooling: str = "mean",
    stack: Sequence[str] = ("Transformer", "Pooling", "Normalize"),
    **config: Any,
) -> Path:
    """Write a small random BERT as a sentence-transformers folder, with a real tokenizer."""
    folder = place / name
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(tokenizer / file, folder / file)
    write(folder / "config.json", TINY | config)
    write(folder / "sentence_bert_config.json", {"max_seq_length": 48, "do_lower_case": False})
    write(folder / "modules.json", [module(number, kind) for number, kind in enumerate(stack)])
    (folder / "1_Pooling").mkdir()
    write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, "pooling_mode": pooling})
    random_weights(folder, TINY | config)
    return folder


def module(number: int, kind: str) -> dict[str, Any]:
    path = "" if kind == "Transformer" else f"{number}_{kind}"
    return {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}


def write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")


def random_weights(folder: Path, config: dict[str, Any]) -> None:
    (folder / "model.safetensors").write_bytes(_weights(json.dumps(config)))


@functools.cache
def _weights(described: str) -> bytes:
    import torch
    from safetensors.torch import save
    from transformers import BertConfig, BertModel

    torch.manual_seed(3)
    config: dict[str, Any] = json.loads(described)
    settings = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "auto_map")}
    model = BertModel(BertConfig(**settings, initializer_range=0.3))
    tensors = {name: value.contiguous() for name, value in model.state_dict().items() if "position_ids" not in name}
    return save(tensors, metadata={"format": "pt"})

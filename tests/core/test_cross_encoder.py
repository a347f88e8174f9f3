"""A tiny cross-encoder with random weights, from its folder."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.core.backends import ModelNotFound, ModelUnsupported, OutOfMemory
from app.src.core.cross_encoder import CrossEncoding
from app.src.core.device import DeviceProfile
from app.src.core.memory import MemoryLimits, memory_of

MINILM = "all-MiniLM-L6-v2"
CPU = DeviceProfile.cpu()


def test_a_cross_encoder_from_a_folder(tmp_path: Path) -> None:
    import torch
    from sentence_transformers import CrossEncoder
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    from app.src.core.backends.folder import find_folder

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    for name, labels in (("one", 1), ("three", 3)):
        configuration = BertConfig.from_dict(shape | {"num_labels": labels})
        BertForSequenceClassification(configuration).save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(find_folder(MINILM)).save_pretrained(tmp_path / name)
    model = CrossEncoding(tmp_path / "one", CPU, MemoryLimits(), "fp32")
    texts = ["oil pump", "garden hose", "chair"]
    scores = model.scores("a pump", texts)
    assert np.isfinite(scores).all()
    assert model.scores("a pump", texts[::-1]) == pytest.approx(scores[::-1], abs=1e-5)
    plain = CrossEncoder(str(tmp_path / "one"), device="cpu", local_files_only=True)
    many = [f"{'oil pump ' * (number * 7 % 23)}{number}" for number in range(80)]
    wanted = plain.predict([("a pump", text) for text in many], show_progress_bar=False)
    assert model.scores("a pump", many) == pytest.approx(wanted.tolist(), abs=1e-6)
    assert model.scores("a pump", []) == []
    with pytest.raises(ModelUnsupported, match="gives 3 numbers a text"):
        CrossEncoding(tmp_path / "three", CPU, MemoryLimits())
    (tmp_path / "one" / "model.safetensors").rename(tmp_path / "one" / "pytorch_model.bin")
    with pytest.raises(ModelUnsupported, match="pickled"):
        CrossEncoding(tmp_path / "one", CPU, MemoryLimits())
    with pytest.raises(ModelNotFound):
        CrossEncoding(tmp_path / "none", CPU, MemoryLimits())


class Model:
    """A `CrossEncoder` on a simulated card; a text's score is its number. `most`: pairs that fit; `overflows`: the
    precision in which scores are infinite."""

    loaded: list[tuple[str, str]]
    batches: list[list[str]]
    alive: weakref.WeakSet[Model]
    most = 1000
    overflows = ""
    num_labels = 1

    def __init__(self, folder: str, *, device: str, model_kwargs: dict[str, Any], **_named: Any) -> None:
        self.dtype = str(model_kwargs["dtype"]).removeprefix("torch.")
        self.loaded.append((device, self.dtype))
        self.alive.add(self)

    def predict(self, pairs: Sequence[tuple[str, str]], **_named: Any) -> Any:
        import torch

        self.batches.append([text for _query, text in pairs])
        if len(pairs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. planted")
        scores = np.array([float(text.split()[-1]) for _query, text in pairs], dtype=np.float32)
        return scores + np.inf if self.dtype == self.overflows else scores


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Model]:
    """Every model that is loaded takes 2 GiB."""
    import torch

    class Fresh(Model):
        loaded, batches = [], []

    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr("sentence_transformers.CrossEncoder", Fresh)
    models: weakref.WeakSet[Model] = weakref.WeakSet()
    monkeypatch.setattr(Model, "alive", models, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _index: len(models) << 31)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: Fresh.loaded.append(given))
    return Fresh


TEXTS = [f"{'pump ' * (number * 7 % 23)}{number}" for number in range(70)]


@pytest.mark.parametrize(
    ("name", "dtype"), [("Tesla P4", "float32"), ("Tesla T4", "float16"), ("NVIDIA H100", "float16")]
)
def test_on_a_card_it_has_the_cards_precision_and_its_memory_is_held(
    card: type[Model], tmp_path: Path, name: str, dtype: str
) -> None:
    profile = DeviceProfile.of_card(name)
    model = CrossEncoding(tmp_path, profile, MemoryLimits(0.5, 0))
    assert card.loaded == [(0.5, 0), ("cuda:0", dtype)], "the fraction first"
    assert memory_of(profile).held_bytes == 2 << 30
    assert model.scores("a pump", TEXTS) == list(range(70))
    del model
    gc.collect()
    assert memory_of(profile).held_bytes == 0


def test_on_a_cpu_bf16_is_for_those_that_it_makes_faster(
    card: type[Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for gain, dtype in ((1.0, "float32"), (2.0, "bfloat16")):
        monkeypatch.setattr("app.src.core.backends.torch.linears.bf16_gain", lambda gain=gain: gain)
        CrossEncoding(tmp_path, CPU, MemoryLimits())
        assert card.loaded.pop() == ("cpu", dtype)


def test_a_batch_that_runs_out_of_memory_is_halved(card: type[Model], tmp_path: Path) -> None:
    model = CrossEncoding(tmp_path, DeviceProfile.of_card("Tesla T4"), MemoryLimits())
    card.most = 9
    assert model.scores("a pump", TEXTS) == list(range(70))
    assert [len(batch) for batch in card.batches] == [32, 16, *[8] * 8, 6]
    lengths = [len(text) for batch in card.batches[2:] for text in batch]
    assert lengths == sorted(lengths, reverse=True)
    card.most = 0
    with pytest.raises(OutOfMemory, match="the memory of Tesla T4 does not hold one text") as caught:
        model.scores("a pump", TEXTS)
    assert "pump" not in str(caught.value)
    card.most = 1000
    card.batches.clear()
    model.scores("a pump", TEXTS)
    assert [len(batch) for batch in card.batches] == [32, 32, 6], "memory came back"


def test_a_call_that_is_no_longer_wanted_computes_no_further_batch(card: type[Model], tmp_path: Path) -> None:
    model = CrossEncoding(tmp_path, DeviceProfile.of_card("Tesla T4"), MemoryLimits())
    checks = iter([None])  # the second check finds no more
    with pytest.raises(StopIteration):
        model.scores("a pump", TEXTS, lambda: next(checks))
    assert [len(batch) for batch in card.batches] == [32]
    assert model.scores("a pump", TEXTS) == list(range(70)), "the lock is free again"


def test_a_call_with_few_texts_waits_for_one_batch_of_a_call_with_many(card: type[Model], tmp_path: Path) -> None:
    model = CrossEncoding(tmp_path, DeviceProfile.of_card("Tesla T4"), MemoryLimits())
    few: list[Future[list[float]]] = []

    def start_another() -> None:  # before the first batch is computed
        if not few:
            few.append(threads.submit(model.scores, "a pump", ["7"]))
            while len(model._turns.asked) < 2:
                time.sleep(0.001)

    with ThreadPoolExecutor(1) as threads:
        assert model.scores("a pump", TEXTS, start_another) == list(range(70))
        assert few[0].result(10) == [7]
    assert [len(batch) for batch in card.batches] == [32, 1, 32, 6]


def test_a_model_that_overflows_is_loaded_in_fp32_once(card: type[Model], tmp_path: Path) -> None:
    card.overflows = "float16"
    model = CrossEncoding(tmp_path, DeviceProfile.of_card("Tesla T4"), MemoryLimits())
    for _ in range(2):
        assert model.scores("a pump", TEXTS) == list(range(70))
    assert [each for each in card.loaded if each[0] == "cuda:0"] == [("cuda:0", "float16"), ("cuda:0", "float32")]
    gc.collect()
    assert memory_of(DeviceProfile.of_card("Tesla T4")).held_bytes == 2 << 30, "of the second one only"
    assert model.precision == "fp32"

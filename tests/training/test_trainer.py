"""The training loop with a tiny model on a CPU: it learns, continues after a kill with the same steps, and leaves no
text and no telemetry behind.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.core.backends import DeviceUnavailable
from app.src.core.backends.folder import read_folder
from app.src.core.device import DeviceProfile
from app.src.core.finetune.recipe import TrainingFailed, TrainingJob, TrainingObserver
from app.src.core.loading import EngineOptions, load_engine
from app.src.training.held_out import measured
from app.src.training.pairs import Pair
from tests.training.toy import CANARY, files_with, tiny_model, toy_pairs

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
trainer = pytest.importorskip("app.src.core.finetune.trainer")
pytestmark = pytest.mark.xdist_group("training")
"""With those of test_verb.py: the first training of a process takes seconds to begin."""

HELD_OUT = 20
ALL = toy_pairs(200)
TRAINING = ALL[HELD_OUT:]
CPU = DeviceProfile.cpu()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def job(base: Path, checkpoints: Path, pairs: int = 64, **recipe: Any) -> TrainingJob:
    return TrainingJob(base, checkpoints, TRAINING[:pairs], CPU, **{"epochs": 2, "learning_rate": 3e-3} | recipe)


def weights_of(model: Any) -> dict[str, Any]:
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.allclose(one[name], other[name], atol=1e-6) for name in one)


class Killed(BaseException):
    """As the process ends: nothing catches it."""


def killed_after(step: int) -> TrainingObserver:
    def look(done: int, _steps: int, _loss: float | None) -> None:
        if done == step:
            raise Killed

    return TrainingObserver(step=look)


def figures(folder: Path) -> dict[str, Any]:
    pairs = [Pair(*pair) for pair in ALL]
    with load_engine(EngineOptions(str(folder), device="cpu", precision="fp32")) as engine:
        embed = lambda texts, input_type: engine.embed(list(texts), input_type=input_type)  # noqa: E731
        return measured(pairs[:HELD_OUT], pairs[HELD_OUT:], embed)


@pytest.mark.slow
def test_it_learns_what_it_never_saw_and_the_engine_loads_it(base: Path, tmp_path: Path) -> None:
    model, trained = trainer.train(job(base, tmp_path / "c", pairs=len(TRAINING), epochs=8), TrainingObserver())
    assert (trained["steps"], trained["began_at"], trained["stopped"]) == (96, 0, False)
    assert trained["losses"][max(trained["losses"])] < trained["losses"][min(trained["losses"])] / 2
    trainer.save(model, read_folder(base, "tiny"), tmp_path / "trained")
    before, after = figures(base), figures(tmp_path / "trained")
    assert before["recall_at_10"] < 0.35
    assert after["recall_at_10"] > before["recall_at_10"] + 0.3
    assert after["mrr"] > before["mrr"] + 0.2
    assert files_with(CANARY, tmp_path) == [], "no text in checkpoints or in the model"
    with load_engine(EngineOptions(str(tmp_path / "trained"), device="cpu", precision="fp32")) as engine:
        assert engine.path == "packed", engine.path_reason


def test_a_saved_folder_has_the_base_models_files_and_other_weights(base: Path, tmp_path: Path) -> None:
    (base / "pytorch_model.bin").write_bytes(b"old")
    (base / "README.md").write_text("of somebody else")
    model = trainer.load_model(base, "cpu")
    trainer.save(model, read_folder(base, "tiny"), tmp_path / "saved")
    ours = {path.relative_to(tmp_path / "saved") for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    theirs = {path.relative_to(base) for path in base.rglob("*") if path.is_file()}
    assert theirs - ours == {Path("pytorch_model.bin"), Path("README.md")}
    assert ours <= theirs
    for path in ours - {Path("model.safetensors")}:
        assert (tmp_path / "saved" / path).read_bytes() == (base / path).read_bytes()
    with load_engine(EngineOptions(str(base), device="cpu", precision="fp32")) as one:
        wanted = one.embed(["oil pump", "a"])
    with load_engine(EngineOptions(str(tmp_path / "saved"), device="cpu", precision="fp32")) as other:
        np.testing.assert_allclose(other.embed(["oil pump", "a"]), wanted, atol=1e-6)
    (base / "pytorch_model.bin").unlink()
    (base / "README.md").unlink()


def test_after_a_kill_the_steps_are_those_of_a_whole_run(base: Path, tmp_path: Path) -> None:
    whole, told = trainer.train(job(base, tmp_path / "whole"), TrainingObserver())
    with pytest.raises(Killed):
        trainer.train(job(base, tmp_path / "cut"), killed_after(6))
    torn = tmp_path / "cut" / "checkpoint-99"
    torn.mkdir()
    model, trained = trainer.train(job(base, tmp_path / "cut"), TrainingObserver())
    assert trained["began_at"] == 5
    assert trained["steps"] == told["steps"] == 8
    assert trained["losses"] == pytest.approx(told["losses"], abs=1e-5)
    assert same_weights(weights_of(model), weights_of(whole))
    assert not torn.exists()


@pytest.mark.slow
def test_a_wish_to_stop_leaves_a_checkpoint_of_that_very_step(base: Path, tmp_path: Path) -> None:
    done: list[int] = []
    hooks = TrainingObserver(step=lambda step, *_: done.append(step), stop=lambda: len(done) >= 3)
    _, trained = trainer.train(job(base, tmp_path), hooks)
    assert (trained["steps"], trained["stopped"]) == (3, True)
    _, trained = trainer.train(job(base, tmp_path), TrainingObserver())
    assert (trained["began_at"], trained["steps"], trained["stopped"]) == (3, 8, False)


@pytest.mark.slow
def test_a_training_that_was_done_is_not_done_again(base: Path, tmp_path: Path) -> None:
    model, _ = trainer.train(job(base, tmp_path, epochs=1), TrainingObserver())
    seen: list[int] = []
    observer = TrainingObserver(step=lambda step, *_: seen.append(step))
    again, trained = trainer.train(job(base, tmp_path, epochs=1), observer)
    assert (seen, trained["steps"]) == ([], 4)
    assert same_weights(weights_of(model), weights_of(again))


def test_exhausted_memory_is_an_error(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def training_step(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(trainer.PairTrainer, "training_step", training_step)
    with pytest.raises(TrainingFailed, match="memory does not hold 32 pairs at once: use --batch-size 16"):
        trainer.train(job(base, tmp_path, batch_size=32), TrainingObserver())


@pytest.mark.slow
def test_a_loss_that_is_no_number_is_an_error(base: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match="lower --learning-rate"):
        trainer.train(job(base, tmp_path, learning_rate=1e30, epochs=1), TrainingObserver())


# -------------------------------------------------------------------------------------------- nobody is told anything


def test_nothing_is_printed_or_sent(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_network(*_: Any) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setenv("WANDB_PROJECT", "somewhere")
    monkeypatch.setattr(socket.socket, "connect", no_network)
    trainer.train(job(base, tmp_path, epochs=1), TrainingObserver())
    told = capfd.readouterr()
    assert told.out == ""
    assert CANARY not in told.err


# ------------------------------------------------------------------------------------------------------- what of cards


@pytest.mark.parametrize(
    ("card", "fp16", "bf16"), [("Tesla T4", True, False), ("NVIDIA A100", False, True), ("Tesla P4", False, False)]
)
def test_what_the_trainer_is_told_on_a_card(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: str, fp16: bool, bf16: bool
) -> None:
    """Its arguments refuse to be made where there is no card, so they are recorded."""
    import sentence_transformers

    class Recorded:
        def __init__(self, **given: Any) -> None:
            self.given = given
            self._n_gpu = 4

    monkeypatch.setattr(sentence_transformers, "SentenceTransformerTrainingArguments", Recorded)
    on_card = TrainingJob(base, tmp_path, TRAINING, DeviceProfile.of_card(card))
    told: Any = trainer.training_arguments(on_card)
    given = told.given
    assert (given["fp16"], given["bf16"], given["use_cpu"]) == (fp16, bf16, False)
    assert (given["optim"], given["dataloader_pin_memory"]) == ("adamw_torch_fused", True)
    assert (given["report_to"], given["push_to_hub"]) == ("none", False)
    assert told._n_gpu == 1, "several cards would be used as one"


def test_another_card_than_the_first_is_refused_with_what_to_do(base: Path, tmp_path: Path) -> None:
    second = DeviceProfile.cuda("Tesla T4", (7, 5), 16 << 30, index=1)
    elsewhere = TrainingJob(base, tmp_path, TRAINING, second)
    with pytest.raises(DeviceUnavailable, match="CUDA_VISIBLE_DEVICES=1"):
        trainer.train(elsewhere, TrainingObserver())


@pytest.mark.parametrize(
    ("prompts", "given", "kept"),
    [
        ({"query": "q: ", "passage": "p: "}, (None, None), ("q: ", "p: ")),
        ({"query": "q: ", "passage": "p: "}, ("", "text: "), ("", "text: ")),
        ({"query": "q: ", "passage": "p: "}, (None, ""), ("q: ", "")),
        (None, ("q: ", None), ("q: ", "")),
        (None, (None, None), ("", "")),
    ],
)
def test_a_saved_folder_has_the_prompts_of_the_training(
    tmp_path: Path, prompts: Any, given: tuple[str | None, str | None], kept: tuple[str, str]
) -> None:
    base, saved = tiny_model(tmp_path / "base"), tmp_path / "saved"
    described = "config_sentence_transformers.json"
    (base / described).unlink(missing_ok=True)
    if prompts is not None:
        (base / described).write_text(
            json.dumps({"prompts": prompts | {"other": "o: "}, "default_prompt_name": "other"})
        )
    trainer.save(trainer.load_model(base, "cpu"), read_folder(base, "tiny", *given), saved)
    read = read_folder(saved, "tiny")
    assert (read.query_prompt, read.document_prompt) == kept
    assert (saved / described).exists() == (kept != ("", "") or prompts is not None)
    peer = trainer.load_model(saved, "cpu")
    assert (peer.prompts["query"], peer.prompts["document"]) == kept, "for sentence-transformers too"


def test_activations_are_computed_again_instead_of_kept(base: Path) -> None:
    encoder: Any = trainer.load_model(base, "cpu")[0].auto_model
    new_name = "is_activation_checkpointing"
    assert getattr(encoder, new_name if hasattr(type(encoder), new_name) else "is_gradient_checkpointing")


@pytest.mark.gpu
def test_on_a_card(tmp_path: Path) -> None:
    """In its own mixed precision, it learns, and gives a model that the engine loads."""
    from app.src.core.device import detect

    profile = detect("cuda")
    base = tiny_model(tmp_path / "tiny")
    on_card = TrainingJob(base, tmp_path / "c", TRAINING, profile, epochs=8, learning_rate=3e-3)
    model, trained = trainer.train(on_card, TrainingObserver())
    assert trained["losses"][max(trained["losses"])] < trained["losses"][min(trained["losses"])] / 2
    trainer.save(model, read_folder(base, "tiny"), tmp_path / "trained")
    assert figures(tmp_path / "trained")["recall_at_10"] > figures(base)["recall_at_10"] + 0.3

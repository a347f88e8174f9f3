"""`owl-sap calibrate` as a person runs it, against the emulator with its sample tables and the real model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.src.core.backends.folder import find_folder
from hana_emulator.testing import Emulator
from tests.core.conftest import TINY, module, random_weights, write
from tests.core.test_int8 import needs_vnni

pytest.importorskip("hdbcli.dbapi")

Cli = Callable[..., Any]

NOTIFICATIONS = """
[[collections]]
name = "notifications"
source = "SAPDEMO.QMEL"
where = "MANDT = '100'"
template = "{QMTXT}. {LTEXT}"
"""


@pytest.fixture
def hana(sample: Emulator, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "owl-sap.toml").write_text(NOTIFICATIONS, encoding="utf-8")
    return {
        "HANA_HOST": sample.host,
        "HANA_PORT": str(sample.port),
        "HANA_USER": sample.user,
        "HANA_PASSWORD": sample.password,
        "HANA_ENCRYPT": "false",
        "OWL_SAP_STORE__KIND": "local",
        "OWL_SAP_STORE__PATH": "vectors",
        "OWL_SAP_EMBEDDING__DEVICE": "cpu",
    }


def _no_rows(run: Any) -> None:
    """Nothing of what was read is on the screen."""
    assert not any(word in run.out + run.err for word in ("pump", "Pumpe", "leak", "bearing"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random BERT with a real tokenizer: INT8 of it takes seconds."""
    folder, minilm = tmp_path_factory.mktemp("model"), find_folder("all-MiniLM-L6-v2")
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(minilm / file, folder / file)
    (folder / "1_Pooling").mkdir()
    write(folder / "config.json", TINY)
    write(folder / "sentence_bert_config.json", {"max_seq_length": 48, "do_lower_case": False})
    write(folder / "modules.json", [module(number, kind) for number, kind in enumerate(("Transformer", "Pooling"))])
    write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, "pooling_mode": "mean"})
    random_weights(folder, TINY)
    return str(folder)


@needs_vnni
@pytest.mark.slow
def test_calibrated_judged_and_kept(cli: Cli, hana: dict[str, str], tiny: str) -> None:
    """The verdict decides over the exit code; the same texts give the same verdict."""
    hana |= {"OWL_SAP_EMBEDDING__MODEL": tiny}
    first = cli("calibrate", "notifications", "--texts", "140", "--json", **hana)
    found = first.json
    assert found["collection"] == "notifications"
    assert first.code == (1 if found["reason"].startswith("refused: ") else 0), first.err
    assert 0 < found["calibrated_on"] <= 140
    assert 0.5 < found["verdict"]["mean_cosine"] < 1
    again = cli("calibrate", "notifications", "--texts", "140", "--json", **hana)
    assert (again.code, again.json["verdict"]) == (first.code, found["verdict"]), again.err
    for run in (first, again):
        _no_rows(run)


@needs_vnni
@pytest.mark.slow
def test_a_collection_with_a_model_of_its_own(cli: Cli, tmp_path: Path, hana: dict[str, str], tiny: str) -> None:
    """As `finetune` leaves it: that model is calibrated, with texts cut as it takes them, and not the settings'."""
    (tmp_path / "owl-sap.toml").write_text(f'{NOTIFICATIONS}model = "{tiny}"\n', encoding="utf-8")
    hana |= {"OWL_SAP_EMBEDDING__MODEL": "hash:64"}
    run = cli("calibrate", "notifications", "--texts", "140", "--json", **hana)
    assert run.code in (0, 1), run.err  # whether random weights pass the gate is of no interest here
    assert run.json["model"] == tiny
    _no_rows(run)


@needs_vnni
@pytest.mark.slow
def test_the_packaged_model_passes_and_serves(cli: Cli, hana: dict[str, str]) -> None:
    run = cli("calibrate", "notifications", "--texts", "200", "--json", **hana)
    assert run.code == 0, run.err
    assert run.json["report"]["int8_share"] >= 0.5
    hana |= {"OWL_SAP_EMBEDDING__PRECISION": "int8"}
    (status,) = cli("sync", "notifications", "--json", **hana).json
    assert status["upserted"] > 100
    assert cli("verify", "notifications", "--json", **hana).json["ok"] is True
    assert "calibrated; 8-bit products" in cli("doctor", "--json", **hana).out
    _no_rows(run)


def test_what_is_refused_and_how(here: Cli, tmp_path: Path, hana: dict[str, str]) -> None:
    hashing = hana | {"OWL_SAP_EMBEDDING__MODEL": "hash:64"}
    for code, said, arguments, variables in (
        (2, "nothing", ["nothing"], hashing),
        (2, "no layers", ["notifications"], hashing),
        (3, "", ["notifications"], hashing | {"HANA_PORT": "1", "OWL_SAP_HANA__CONNECT_TIMEOUT": "0.2"}),
        (2, "128", ["notifications", "--texts", "5"], hashing),
    ):
        run = here("calibrate", *arguments, **variables)
        assert (run.code, run.out) == (code, ""), run.err
        assert said in run.err
        _no_rows(run)
    own = NOTIFICATIONS + 'model = "hash:32"\n'
    (tmp_path / "owl-sap.toml").write_text(own, encoding="utf-8")
    run = here("calibrate", "notifications", **hashing)
    assert (run.code, "'hash:32' is the test embedder" in run.err) == (2, True), (
        "the collection's own model is calibrated"
    )
    few = NOTIFICATIONS.replace("MANDT = '100'", "MANDT = '100' AND QMNUM < '000010000050'")
    (tmp_path / "owl-sap.toml").write_text(few, encoding="utf-8")
    run = here("calibrate", "notifications", **hashing)
    assert (run.code, run.out) == (1, ""), run.err
    assert "calibration needs at least 160" in run.err

"""`owl-sap calibrate` as a person runs it, against the stand-in with its sample tables and the real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.emulator.process import Emulator, running

pytest.importorskip("onnxruntime", reason="needs the extra onnx")
pytest.importorskip("hdbcli.dbapi")

Cli = Callable[..., Any]

NOTIFICATIONS = """
[[collections]]
name = "notifications"
source = "SAPDEMO.QMEL"
where = "MANDT = '100'"
template = "{QMTXT}. {LTEXT}"
"""


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with running("--data", str(tmp_path_factory.mktemp("sample")), "--sample") as emulator:
        yield emulator
        assert emulator.stop() == 0


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


@pytest.mark.covers("calibrate")
def test_calibrated_judged_and_kept(cli: Cli, tmp_path: Path, hana: dict[str, str]) -> None:
    run = cli("calibrate", "notifications", "--texts", "140", "--algorithm", "minmax", "--json", **hana)
    found = run.json
    assert run.code == (0 if found["accepted"] else 1), run.err
    assert found["collection"] == "notifications"
    assert found["verdict"]["mean_cosine"] > 0.95
    assert 0 <= found["verdict"]["overlap"] <= 1
    assert found["verdict"]["accepted"] is found["accepted"]
    assert found["calibrated_on"] + found["verdict"]["texts"] <= 175
    assert found["cached"] is False
    assert list((tmp_path / "vectors" / "tensorrt").glob("quantised-*/model.onnx"))
    _no_rows(run)


@pytest.mark.covers("calibrate", errors=True)
def test_what_is_refused_and_how(cli: Cli, tmp_path: Path, hana: dict[str, str]) -> None:
    hashing = hana | {"OWL_SAP_EMBEDDING__MODEL": "hash:64"}
    for code, said, arguments, variables in (
        (2, "nothing", ["nothing"], hashing),
        (2, "no layers", ["notifications"], hashing),
        (3, "", ["notifications"], hashing | {"HANA_PORT": "1", "OWL_SAP_HANA__CONNECT_TIMEOUT": "0.2"}),
        (2, "median", ["notifications", "--algorithm", "median"], hashing),
        (2, "128", ["notifications", "--texts", "5"], hashing),
    ):
        run = cli("calibrate", *arguments, **variables)
        assert (run.code, run.out) == (code, ""), run.err
        assert said in run.err
        _no_rows(run)
    few = NOTIFICATIONS.replace("MANDT = '100'", "MANDT = '100' AND QMNUM < '000010000050'")
    (tmp_path / "owl-sap.toml").write_text(few, encoding="utf-8")
    run = cli("calibrate", "notifications", **hashing)
    assert (run.code, run.out) == (1, "")
    assert "texts are too few: at least 160" in run.err

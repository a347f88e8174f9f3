"""`owl-sap finetune` as a person uses it: over rows of a table in the emulator, and over a file of pairs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from app.src.cli import app
from app.src.core.finetune.recipe import last_checkpoint
from app.src.service.service import Service
from app.src.settings import load
from hana_emulator.testing import Emulator
from tests.forked import owl_sap
from tests.surface.conftest import Run, environment
from tests.training.toy import CANARY, files_with, tiny_model, toy_pairs, write_pairs

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytestmark = pytest.mark.xdist_group("training")

TOML = """
[embedding]
model = "{model}"
precision = "fp32"
device = "cpu"
threads = 1
[store]
kind = "local"
path = "vectors"
[[collections]]
name = "rows"
source = "{schema}.T"
template = "{{TITLE}}"
"""
LEARN = ("--epochs", "8", "--learning-rate", "0.003")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


Verb = Callable[..., Run]


def login(emulator: Emulator) -> dict[str, str]:
    given = {"HOST": emulator.host, "PORT": str(emulator.port), "USER": emulator.user, "PASSWORD": emulator.password}
    return {f"HANA_{name}": value for name, value in given.items()} | {"HANA_ENCRYPT": "false"}


@pytest.fixture
def configured(tmp_path: Path, base: Path, emulator: Emulator) -> Callable[[str], Verb]:
    """Given the schema, writes the settings and gives the command line beside them."""

    def configure(schema: str = "NOWHERE") -> Verb:
        (tmp_path / "owl-sap.toml").write_text(TOML.format(model=base, schema=schema), encoding="utf-8")

        def run(*arguments: str) -> Run:
            """In this process, which has begun a training before."""
            with chdir(tmp_path), patch.dict(os.environ, environment(**login(emulator)), clear=True):
                result = CliRunner().invoke(app, arguments, prog_name="owl-sap")
            assert isinstance(result.exception, SystemExit | None), result.exception
            assert "Traceback" not in result.stderr, result.stderr
            return Run(CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr))

        return run

    return configure


def fill(emulator: Emulator, schema: str, count: int) -> None:
    connection = emulator.connect(autocommit=True, currentSchema=schema)
    cursor = connection.cursor()
    cursor.execute('CREATE TABLE "T" ("K" INTEGER PRIMARY KEY, "TITLE" NVARCHAR(80), "LTEXT" NCLOB, "PIC" BLOB)')
    rows: list[tuple[Any, ...]] = [(number, *pair) for number, pair in enumerate(toy_pairs(count))]
    rows += [(count, "no long text", None), (count + 1, None, "no title")]
    cursor.executemany('INSERT INTO "T" ("K", "TITLE", "LTEXT") VALUES (?, ?, ?)', rows)
    connection.close()


@pytest.mark.slow
def test_from_rows_to_a_generation_that_serves(
    configured: Callable[[str], Verb], emulator: Emulator, hana_schema: str, tmp_path: Path
) -> None:
    fill(emulator, hana_schema, 200)
    cli = configured(hana_schema)
    assert cli("sync", "rows").code == 0
    report = cli("finetune", "rows", "--columns", "TITLE", "LTEXT", *LEARN, "--json").json
    assert report["generation"] == 2
    settings = tmp_path / "owl-sap.toml"
    settings.write_text(settings.read_text(encoding="utf-8") + f'model = "{report["folder"]}"\n', encoding="utf-8")
    assert cli("generations", "rows", "--switch").code == 0
    (synced,) = cli("sync", "rows", "--json").json
    assert (synced["unchanged"], synced["embedded_texts"]) == (201, 0), "the settings name what serves"


def test_rows_become_a_model_and_a_generation(
    configured: Callable[[str], Verb],
    emulator: Emulator,
    hana_schema: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill(emulator, hana_schema, 200)
    cli = configured(hana_schema)
    monkeypatch.chdir(tmp_path)
    service = Service(load(environ=login(emulator)).settings)
    assert service.sync.run("rows").upserted == 201
    service.close()

    run = cli("finetune", "rows", "--columns", "TITLE", "LTEXT", "--epochs", "3", "--learning-rate", "0.01", "--json")
    assert run.code == 0, run.err
    report = run.json
    assert (report["pairs"]["read"], report["pairs"]["pairs"], report["pairs"]["incomplete"]) == (202, 200, 2)
    assert (report["training"]["pairs"], report["training"]["held_out"]) == (180, 20)
    assert report["after"]["recall_at_10"] > report["before"]["recall_at_10"] + 0.3
    assert (report["generation"], report["worse"], report["stopped"]) == (2, False, False)
    assert "Developer License Agreement" in run.err, "rows read through SAP's driver"

    folder = Path(report["folder"])
    assert folder == tmp_path / "vectors" / "models" / "rows-1"
    assert not folder.with_name("rows-1.unfinished").exists()
    card = (folder / "README.md").read_text(encoding="utf-8")
    for fact in (report["base"]["weights_sha256"], report["weights_sha256"], "180 to learn from, 20 held out"):
        assert fact in card
    assert "Developer License Agreement" in card
    assert str(tmp_path) not in card
    assert json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["after"] == report["after"]
    assert files_with(CANARY, folder) == []
    assert CANARY not in run.err + run.out

    assert f'model = "{folder}"' in run.err


@pytest.mark.slow
def test_a_file_of_pairs_stopped_and_gone_on_with(configured: Callable[[], Verb], tmp_path: Path) -> None:
    """Ctrl-C keeps a checkpoint; --resume needs nothing more to be said."""
    cli = configured()
    write_pairs(tmp_path / "pairs.jsonl", toy_pairs(120))
    arguments = ["finetune", "rows", "--pairs", "pairs.jsonl", "--epochs", "60", "--no-generation", "--out", "m/new"]
    code, errors = interrupted(tmp_path, *arguments)
    assert code == 130, errors
    assert "owl-sap finetune rows --resume --out m/new" in errors
    assert "stops at once, without" in errors, "a second one keeps no checkpoint, and the next run needs --resume"
    unfinished = tmp_path / "m" / "new.unfinished"
    kept, _ = last_checkpoint(unfinished / "checkpoints")
    assert kept is not None
    assert files_with(CANARY, unfinished) == []

    again = cli(*arguments)
    assert (again.code, "continue it with --resume" in again.err) == (2, True)
    other = cli("finetune", "rows", "--resume", "--epochs", "3", "--out", "m/new")
    assert (other.code, "omit epochs, or delete the folder" in other.err) == (2, True)

    state = json.loads((kept / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] < state["max_steps"] == 60 * 7


def interrupted(folder: Path, *arguments: str) -> tuple[int, str]:
    """Ctrl-C as soon as the first step is told of."""
    process = owl_sap(
        *arguments,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    told = []
    for line in process.stderr:
        told.append(line)
        if re.search(r'"step":\d', line):
            break
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    return process.returncode, "".join(told) + rest


def test_what_cannot_be_learnt_from(
    configured: Callable[[str], Verb], emulator: Emulator, hana_schema: str, tmp_path: Path
) -> None:
    fill(emulator, hana_schema, 25)
    cli = configured(hana_schema)
    (tmp_path / "bad.jsonl").write_text('{"query": "a", "text": "b"}\n{"query": "canary"}\n', encoding="utf-8")
    for arguments, words in (
        (["--pairs", "bad.jsonl"], "bad.jsonl, line 2 needs"),
        (["--columns", "TITLE", "LTEKST"], "LTEXT"),
    ):
        run = cli("finetune", "rows", *arguments)
        assert run.code == 2, run.err
        assert words in run.err
        assert "canary" not in run.err
    assert list((tmp_path / "vectors").rglob("begun.json")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--pairs FILE.jsonl, or --columns TITLE LONGTEXT"),
        (["--pairs", "few.jsonl", "--columns", "TITLE", "LTEXT"], "--pairs FILE.jsonl, or --columns TITLE LONGTEXT"),
        (["--pairs", "few.jsonl"], "5 pairs to learn from"),
        (["--pairs", "none.jsonl"], "cannot be read"),
        (["--pairs", "few.jsonl", "--batch-size", "24"], "16 or 32"),
        (["--pairs", "few.jsonl", "--out", "here"], "already exists"),
        (["--resume"], "nothing to resume"),
        (["--columns", "TITLE", "PIC"], "is a BLOB"),
        (["--columns", "TITLE", "TITLE"], "twice"),
    ],
)
def test_refusals(
    configured: Callable[[str], Verb],
    emulator: Emulator,
    hana_schema: str,
    tmp_path: Path,
    arguments: list[str],
    words: str,
) -> None:
    fill(emulator, hana_schema, 25)
    write_pairs(tmp_path / "few.jsonl", toy_pairs(5))
    (tmp_path / "here").mkdir()
    run = configured(hana_schema)("finetune", "rows", *arguments)
    assert run.code == 2, run.err
    assert words in run.err


@pytest.mark.slow
def test_a_model_that_finds_less_is_not_proposed(configured: Callable[[], Verb], tmp_path: Path) -> None:
    """What it learnt first is unlearnt: each query with the text of another."""
    cli = configured()
    pairs = toy_pairs(200)
    write_pairs(tmp_path / "right.jsonl", pairs)
    first = cli("finetune", "rows", "--pairs", "right.jsonl", *LEARN, "--no-generation", "--json").json
    assert first["worse"] is False
    settings = tmp_path / "owl-sap.toml"
    settings.write_text(settings.read_text(encoding="utf-8") + f'model = "{first["folder"]}"\n', encoding="utf-8")
    held_out = 20
    write_pairs(tmp_path / "right.jsonl", pairs)
    run = cli("finetune", "rows", "--pairs", "right.jsonl", "--epochs", "2", "--learning-rate", "0.9", "--json")
    assert run.code == 1, run.err
    assert run.json["worse"] is True
    assert run.json["after"]["recall_at_10"] < run.json["before"]["recall_at_10"]
    assert run.json["generation"] is None
    assert Path(run.json["folder"], "model.safetensors").is_file()
    assert "do not use it" in Path(run.json["folder"], "README.md").read_text(encoding="utf-8")
    assert "not proposed" in run.err
    assert run.json["before"]["queries"] == held_out


def test_what_is_refused_leaves_no_folder(configured: Callable[[], Verb], tmp_path: Path) -> None:
    cli = configured()
    write_pairs(tmp_path / "few.jsonl", toy_pairs(12))
    assert cli("finetune", "rows", "--pairs", "few.jsonl", "--out", "new").code == 2
    assert not (tmp_path / "new.unfinished").exists()
    (tmp_path / "new.unfinished").mkdir()
    (tmp_path / "new.unfinished" / "note").touch()
    assert cli("finetune", "rows", "--pairs", "few.jsonl", "--out", "new").code == 2
    assert [file.name for file in (tmp_path / "new.unfinished").iterdir()] == ["note"], "what is another's stays"


@pytest.mark.slow
def test_after_kill_9_it_comes_to_the_same_model(configured: Callable[[], Verb], base: Path, tmp_path: Path) -> None:
    cli = configured()
    write_pairs(tmp_path / "pairs.jsonl", toy_pairs(120))
    arguments = ["finetune", "rows", "--pairs", "pairs.jsonl", *LEARN, "--no-generation", "--json", "--out"]
    whole = cli(*arguments, "whole").json
    process = owl_sap(
        *arguments,
        "cut",
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cut.unfinished" / "checkpoints").glob("checkpoint-*/trainer_state.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    resumed = cli("finetune", "rows", "--resume", "--no-generation", "--json", "--out", "cut")
    assert resumed.code == 0, resumed.err
    assert resumed.json["training"]["began_at"] > 0
    assert resumed.json["training"]["steps"] == whole["training"]["steps"]
    assert resumed.json["after"] == whole["after"]
    cut_losses, losses = (dict(each["training"]["losses"]) for each in (resumed.json, whole))
    assert cut_losses == pytest.approx(losses, abs=1e-3), "the same steps, but for rounding"

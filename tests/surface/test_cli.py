"""Every verb that needs no database, most of them through a process: output, messages and exit codes."""

from __future__ import annotations

import importlib.metadata
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

from app.src.cli import app
from app.src.cli.application import PANELS, subcommands, verb
from app.src.cli.collections import _is_paused
from connector.sync.run import SyncReport
from tests.surface.conftest import environment

HASH = {"OWL_SAP_EMBEDDING__MODEL": "hash:16"}
LOCAL = HASH | {"OWL_SAP_STORE__KIND": "local", "OWL_SAP_STORE__PATH": "vectors"}
COLLECTION = '[[collections]]\nname = "materials"\nsource = "S.T"\ntemplate = "{X}"\n'
VERBS = ["demo", "emulator", "doctor", "sync", "verify", "search", "embed", "status", "serve", "config"]

Cli = Callable[..., Any]


@pytest.fixture
def configured(tmp_path: Path) -> None:
    (tmp_path / "owl-sap.toml").write_text(COLLECTION)


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def one_message(run: Any, code: int, *words: str) -> None:
    """It ended with `code`, nothing on stdout, and one line on stderr that has these words."""
    assert run.code == code, run.err
    assert run.out == ""
    assert len(run.err.strip().splitlines()) == 1, run.err
    assert all(word in run.err for word in words), run.err


def test_help_and_version(cli: Cli) -> None:
    whole = cli("--help")
    assert whole.code == 0
    assert all(verb in whole.out for verb in VERBS)
    assert cli("--version").out.strip() == importlib.metadata.version("owl-sap-connector")


def _shown_verbs(help_text: str) -> dict[str, list[str]]:
    """The verbs of each panel, in the order shown."""
    panels: dict[str, list[str]] = {}
    shown: list[str] = []
    for line in help_text.splitlines():
        if found := re.match(r"\W*╭─ (\w+)", line):
            shown = panels.setdefault(found[1], [])
        elif found := re.match(r"│ (\w+) ", line):
            shown.append(found[1])
    return panels


def test_verbs_emulator_panels_in_the_order_of_use(cli: Cli) -> None:
    shown = _shown_verbs(cli("--help").out)
    shown.pop("Options")
    assert shown == {panel: list(names) for panel, names in PANELS.items()}
    assert list(shown) == ["Start", "Search", "Operate", "Advanced"]
    assert shown["Start"][:4] == ["init", "doctor", "sync", "search"]
    command: Any = get_command(app)
    assert sorted(name for names in PANELS.values() for name in names) == sorted(command.commands)


def test_a_verb_without_a_panel_is_refused() -> None:
    with pytest.raises(KeyError, match="polish"):
        verb(app, "polish")
    with pytest.raises(KeyError, match="polish"):
        subcommands("polish", "Rub until it shines.")


def test_global_options_are_taken_after_the_verb_too(cli: Cli, tmp_path: Path) -> None:
    """Also after a group of verbs with an action of its own; the last one given counts."""
    (tmp_path / "other.toml").write_text('[store]\nkind = "local"\npath = "elsewhere"\n')
    assert "{" not in cli("explain", "--output", "table").out
    assert all(line.startswith("{") for line in cli("explain", "--output", "lines").out.splitlines())
    assert "{" not in cli("--output", "lines", "explain", "--output", "table").out
    shown = cli("config", "show", "--json", "--config", "other.toml").json
    assert shown["store.path"] == "elsewhere"
    assert "Traceback" in cli("search", "nothing", "x", "--debug", traceback=True, **LOCAL).err
    assert cli("jobs", "--config", "other.toml", "--output", "table").code == 0
    wrong = cli("doctor", "--output", "pretty")
    assert (wrong.code, "--output" in wrong.err) == (2, True)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(here: Cli, verb: str) -> None:
    run = here(verb, "--help")
    assert run.code == 0
    assert "Usage" in run.out


def test_no_row_is_like_another_in_an_empty_collection(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "owl-sap.toml").write_text('[[collections]]\nname = "notes"\ndocuments = true\n')
    alike = cli("search", "notes", "--like", "abc", **LOCAL)
    assert (alike.code, "[OWL-1017]" in alike.err) == (2, True), alike.err


def test_a_collection_that_clients_write_is_not_synced(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "owl-sap.toml").write_text('[[collections]]\nname = "notes"\ndocuments = true\n')
    for arguments in (("sync", "notes"), ("plan", "notes"), ("verify", "notes")):
        run = cli(*arguments, **LOCAL)
        assert (run.code, "written by clients (documents = true)" in run.err) == (2, True), run.err
    one_message(cli("sync", "--all", **LOCAL), 2, "every collection is written by clients")


# --------------------------------------------------------------------------------------------------------------- embed


def test_embed_writes_json_lines_in_order(cli: Cli) -> None:
    run = cli("embed", stdin="steel\noil\n\nsteel\n", **HASH)
    assert run.code == 0
    vectors = [json.loads(line) for line in run.out.splitlines()]
    assert [len(vector) for vector in vectors] == [16] * 4
    assert vectors[0] == vectors[3] != vectors[1]


def test_embed_as_one_document_and_as_a_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("a b\nÄpfel 🦉\n", encoding="utf-8")
    document = cli("embed", "texts", "--json", **HASH).json
    run = cli("embed", "texts", "--out", "vectors.npy", **HASH)
    stored = np.load(tmp_path / "vectors.npy")
    assert run.out == ""
    assert (stored.dtype, stored.shape) == (np.float32, (2, 16))
    np.testing.assert_allclose(document, stored, atol=1e-7)


def test_embed_of_nothing(cli: Cli, tmp_path: Path) -> None:
    assert cli("embed", "--json", **HASH).json == []
    assert cli("embed", "--out", "none.npy", **HASH).code == 0
    assert np.load(tmp_path / "none.npy").shape == (0, 16)


def test_embed_says_what_it_cut(cli: Cli) -> None:
    run = cli("embed", stdin="word " * 2000 + "\n", **HASH)
    assert "1 texts exceed the model's limit" in run.err


def test_embed_refuses_what_is_no_text(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    one_message(cli("embed", "binary", **HASH), 2, "binary", "UTF-8")
    one_message(cli("embed", "nowhere", **HASH), 2, "nowhere", "No such file")
    one_message(cli("embed", "binary", "--out", "x.csv", **HASH), 2, ".npy")


@pytest.mark.parametrize(
    "locale", ["C", *(pytest.param(name, marks=pytest.mark.slow) for name in ("C.UTF-8", "POSIX"))]
)
def test_bytes_on_stdin_that_are_no_text_are_refused_in_every_locale(tmp_path: Path, locale: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "app", "embed", "--json"],
        cwd=tmp_path,
        env=environment(LC_ALL=locale, **HASH),
        input=b"steel\n\xff\xfe\n",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stdout) == (2, b"")
    assert b"stdin: not UTF-8 text" in run.stderr


def test_a_mark_at_the_start_of_a_file_is_no_text(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("steel\noil\n", encoding="utf-8")
    (tmp_path / "marked").write_text("steel\r\noil\r\n", encoding="utf-8-sig", newline="")
    assert cli("embed", "marked", "--json", **HASH).json == cli("embed", "plain", "--json", **HASH).json
    (tmp_path / "owl-sap.toml").write_text("[sync]\nmax_deletes = 0.5\n", encoding="utf-8-sig")
    assert cli("config", "show", "--json").json["sync.max_deletes"] == 0.5


def test_embed_to_a_file_with_json_says_what_the_file_holds(cli: Cli, tmp_path: Path) -> None:
    run = cli("embed", "--out", "v.npy", "--json", stdin="a\nb\n", **HASH)
    assert run.json == {"file": "v.npy", "vectors": 2, "dimension": 16}


def test_a_target_that_cannot_be_written_is_refused_before_the_work(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "folder.npy").mkdir()
    for target, words in [("no/v.npy", "folder no not found"), ("folder.npy", "cannot be written"), ("v.txt", ".npy")]:
        one_message(cli("embed", "--out", target, OWL_SAP_EMBEDDING__MODEL="no/such-model"), 2, target, words)


def test_a_wrong_model_is_one_message(cli: Cli) -> None:
    one_message(cli("embed", OWL_SAP_EMBEDDING__MODEL="no/such-model"), 2, "no/such-model")
    one_message(cli("embed", OWL_SAP_EMBEDDING__MODEL="hash:x"), 2, "hash:x")


# -------------------------------------------------------------------------------------------------------------- config


def test_a_misspelt_setting_is_one_message(cli: Cli, tmp_path: Path) -> None:
    one_message(cli("status", OWL_SAP_STORE__KNID="local"), 2, "OWL_SAP_STORE__KNID", "OWL_SAP_STORE__KIND")
    (tmp_path / "owl-sap.toml").write_text("[store]\nknid = 'local'\n")
    one_message(cli("status"), 2, "owl-sap.toml", "store.knid", '"kind"')


def test_a_configuration_file_that_is_not_there(cli: Cli) -> None:
    one_message(cli("--config", "nowhere.toml", "status"), 2, "nowhere.toml")


def test_config_show(cli: Cli, configured: None) -> None:
    shown = cli("config", "show", "--json", HANA_PASSWORD="canary-77", HANA_PORT="30015").json
    assert shown["hana.port"] == 30015
    assert shown["collections"][0]["name"] == "materials"
    run = cli("config", "show", "--origin", HANA_PASSWORD="canary-77", HANA_PORT="30015", PYTORCH_JIT="1")
    assert "environment HANA_PORT" in run.out
    assert "TorchScript" in run.err
    assert "canary-77" not in run.out + run.err + json.dumps(shown)
    run = cli("config", "show", "--origin", "--json", T4_GPU_FP16_MODE="true")
    assert {"setting": "embedding.precision", "value": "auto", "origin": "default"} in run.json
    assert "T4_GPU_FP16_MODE: " in run.err
    assert shown["hana.password"] == "**********"


def test_config_schema_knows_every_section(cli: Cli) -> None:
    schema = cli("config", "schema").json
    sections = {"hana", "store", "embedding", "tensorrt", "sync", "api", "access", "mcp", "search", "worker", "state"}
    assert sections | {"collections", "scale"} == set(schema["properties"])
    assert "schema" in schema["$defs"]["HanaSettings"]["properties"]


# --------------------------------------------------------------------------------------------------------- collections


def test_status(cli: Cli, tmp_path: Path) -> None:
    assert cli("status", "--json", **LOCAL).json == []
    (tmp_path / "owl-sap.toml").write_text(COLLECTION)
    (row,) = cli("status", "--json", **LOCAL).json
    assert {"collection", "store", "schema", "table", "generation", "model", "dimension", "rows", "chunks", "empty",
            "last_sync", "lag_seconds", "quarantined", "job"} <= set(row)  # fmt: skip
    assert (row["collection"], row["store"], row["rows"]) == ("materials", "local", 0)
    assert row["foreign"] == 0
    assert "materials" in cli("status", **LOCAL).out


@pytest.mark.parametrize("arguments", [["search", "nope", "hi"], ["sync", "--all"], ["verify", "nope"]])
def test_without_a_file_it_says_so_and_with_an_empty_one_what_is_missing(
    cli: Cli, tmp_path: Path, arguments: list[str]
) -> None:
    one_message(cli(*arguments, **LOCAL), 2, "no owl-sap.toml in the working directory", "--config")
    (tmp_path / "other.toml").write_text("")
    run = cli("--config", "other.toml", *arguments, **LOCAL)
    one_message(run, 2, "other.toml has no [[collections]] block")
    assert "no owl-sap.toml in" in cli("status", **LOCAL).err


@pytest.mark.usefixtures("configured")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status", "materals"], ['did you mean "materials"']),
        (["sync", "materals"], ['did you mean "materials"']),
        (["sync"], ["--all"]),
        (["sync", "materials", "--all"], ["not both"]),
        (["search", "materials", "x"], ["owl-sap sync materials"]),
        (["search", "materials", " "], ["empty"]),
        (["search", "materials", "x", "--min-score", "nan"], ["min_score", "finite"]),
        (["search", "materials", " ", "--mode", "keyword"], ["empty"]),
        (["search", "materials", "x", "--mode", "keyword"], ["owl-sap sync materials"]),
        (["search", "materials", "x", "--filter", "{"], ["--filter", "JSON"]),
        (["search", "materials", "x", "--filter", "[]"], ["--filter", "object"]),
        (["sync", "materials"], ["HANA_HOST"]),
        (["verify", "materials"], ["HANA_HOST"]),
    ],
)
def test_what_cannot_be_done_is_one_message_and_exit_2(here: Cli, arguments: list[str], words: list[str]) -> None:
    run = here(*arguments, **LOCAL)
    assert run.code == 2, run.err
    assert [line for line in run.err.splitlines() if line.startswith("owl-sap:")] == run.err.strip().splitlines()
    assert all(word in run.err for word in words), run.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["sync", "--max-deletes", "2", "x"],
        ["search", "a", "b", "-k", "0"],
        ["search", "a", "b", "--mmr", "2"],
        ["nope"],
    ],
)
def test_usage_errors_are_exit_2(here: Cli, arguments: list[str]) -> None:
    assert here(*arguments).code == 2


def test_a_host_that_is_not_there(cli: Cli, configured: None) -> None:
    port = closed_port()
    hana = {"HANA_HOST": "127.0.0.1", "HANA_PORT": port, "HANA_USER": "U", "HANA_SCHEMA": "S"}
    run = cli("status", HANA_PASSWORD="canary-78", **hana, **HASH)
    one_message(run, 3, f"127.0.0.1:{port}", "refused")
    assert "canary-78" not in run.err


def test_a_password_that_is_not_set_is_one_message(cli: Cli, configured: None) -> None:
    run = cli("status", HANA_HOST="127.0.0.1", HANA_USER="U", HANA_SCHEMA="S", **HASH)
    one_message(run, 2, "[hana]", "password", "HANA_PASSWORD")


@pytest.mark.parametrize("layout", ["table", "lines"])
def test_a_failed_sync_prints_its_error_alone(cli: Cli, configured: None, layout: str) -> None:
    run = cli("--output", layout, "sync", "--all", **LOCAL)
    one_message(run, 2, "owl-sap: materials: no HANA", "OWL-1003")


def test_a_failed_sync_still_gives_its_json(cli: Cli, configured: None) -> None:
    run = cli("sync", "--all", "--json", **LOCAL)
    assert run.code == 2
    (report,) = run.json
    assert (report["collection"], report["read"]) == ("materials", 0)
    assert "HANA_HOST" in report["error"]


def test_doctor_tells_all_and_fails_on_a_fault(cli: Cli) -> None:
    port = closed_port()
    run = cli(
        "doctor", "--json", HANA_HOST="127.0.0.1", HANA_PORT=port, HANA_USER="U", HANA_PASSWORD="canary-79", **HASH
    )
    assert run.code == 1
    checks = {check["check"]: check for check in run.json}
    assert checks["model"]["ok"]
    assert not checks["hana tcp"]["ok"]
    assert all(check["fix"] for check in run.json if not check["ok"])
    assert "canary-79" not in run.out + run.err
    assert cli("doctor", **LOCAL).code == 0


# ----------------------------------------------------------------------------------------------------------- processes


def test_demo_refuses_the_test_embedder(cli: Cli) -> None:
    one_message(cli("demo", **HASH), 2, "hash:16", "real model")


def test_a_store_that_cannot_be_opened_is_one_message_and_debug_says_where(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "vectors").write_text("a file where a folder should be")
    (tmp_path / "owl-sap.toml").write_text(COLLECTION)
    run = cli("status", **LOCAL)
    one_message(run, 3, "vectors.sqlite")
    assert "Traceback" in cli("--debug", "status", traceback=True, **LOCAL).err


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (
            {"to_delete": 27},
            "27 stored rows are no longer in the source, more than max_deletes allows: nothing was deleted",
        ),
        (
            {"to_delete": 27, "deleted": 10},
            "10 of them were deleted before the limit was reached, the others were kept",
        ),
        ({"emptied": 986}, "986 stored rows became blank, more than max_deletes allows: nothing was deleted"),
        (
            {"to_delete": 2, "emptied": 9},
            "2 stored rows are no longer in the source and 9 became blank, more than max_deletes allows: nothing was",
        ),
        (
            {"to_delete": 27, "emptied": 11, "deleted": 10, "complete": False},
            "some may have been deleted before the limit was reached, the others were kept",
        ),
    ],
)
def test_what_the_brake_kept_is_told_as_it_is(
    counts: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run by log meets the entries one after the other, and some of them before the brake."""
    assert _is_paused("m", SyncReport("m", paused="max_deletes", **counts))
    told = capsys.readouterr().err
    assert said in told
    assert told.endswith("owl-sap sync m --full --max-deletes 1\n")

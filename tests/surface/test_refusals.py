"""Refusals of verbs that have no other test of them, and doctor beside a service that runs."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.surface.conftest import Cli

LOCAL = {"OWL_SAP_EMBEDDING__MODEL": "hash:16", "OWL_SAP_STORE__KIND": "local", "OWL_SAP_STORE__PATH": "vectors"}


def test_an_emulator_on_a_taken_port(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = cli("emulator", "--port", port)
    assert (run.code, run.out) == (2, "")
    assert len(run.err.strip().splitlines()) == 1
    assert f"127.0.0.1:{port} is in use; choose another with --port" in run.err


def test_an_emulator_whose_folder_is_a_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    run = cli("emulator", "--data", "taken")
    assert (run.code, run.out) == (2, "")
    assert "--data taken" in run.err
    assert "choose a writable folder" in run.err


def test_settings_that_cannot_be_shown(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "owl-sap.toml").write_text("[hana]\nport = 'canary-87'\n")
    run = cli("config", "show", "--json")
    assert (run.code, run.out) == (2, "")
    assert "hana.port" in run.err
    assert "canary-87" not in run.err

"""docs/hana.md: the walk with a model of HANA runs as it stands there, on the emulator."""

from __future__ import annotations

import os
import re
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.src.cli import app
from hana_emulator.testing import running

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/hana.md").read_text(encoding="utf-8")


def block(name: str) -> str:
    """The block marked `<!-- tested: name -->`."""
    (found,) = re.findall(rf"<!-- tested: {name} -->\n```\w+\n(.*?)```", PAGE, re.S)
    return str(found)


def test_a_collection_with_a_model_of_hana(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owl-sap.toml").write_text(block("settings"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("HANA_", "OWL_SAP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HANA_ENCRYPT", "false")
    with running("--sample") as emulator:
        for name in ("host", "port", "user", "password"):
            monkeypatch.setenv(f"HANA_{name.upper()}", str(getattr(emulator, name)))
        with closing(emulator.connect(autocommit=True)) as connection:
            connection.cursor().execute('CREATE SCHEMA "VECTORS"')
        commands = [line.partition("#")[0].strip() for line in block("walk").splitlines()]
        assert len(commands) == 5
        for command in commands:
            program, *arguments = re.findall(r'"[^"]*"|\S+', command)
            assert program == "owl-sap"
            done = CliRunner().invoke(app, [argument.strip('"') for argument in arguments])
            assert done.exit_code == 0, (command, done.output)

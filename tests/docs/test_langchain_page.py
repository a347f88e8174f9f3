"""The blocks of docs/langchain.md marked `python run` do run, with the page's own configuration, on the emulator."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hdbcli import dbapi

from app.src.langchain import Owl

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "langchain.md").read_text(encoding="utf-8")
TOML = re.findall(r"^```toml\n(.*?)^```", PAGE, re.S | re.M)[0]
READING, WRITING, THEIRS = re.findall(r"^```python run\n(.*?)^```", PAGE, re.S | re.M)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The working directory is a folder with the page's owl-sap.toml, synced from an emulator to which the environment
    leads."""
    folder = tmp_path_factory.mktemp("langchain")
    (folder / "owl-sap.toml").write_text(TOML)
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith(("HANA_", "OWL_SAP_")):
                patch.delenv(name)
        patch.setenv("OWL_SAP_EMBEDDING__MODEL", "hash:384")
        patch.setenv("HANA_ENCRYPT", "false")
        patch.chdir(folder)
        command = [sys.executable, "-m", "hana_emulator", "--port", "0", "--sample"]
        found = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, env=found, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                hana = json.loads(process.stdout.readline())
                for name in ("host", "port", "user", "password"):
                    patch.setenv(f"HANA_{name.upper()}", str(hana[name]))
                login = {name: hana[name] for name in ("port", "user", "password")} | {"encrypt": False}
                connection = dbapi.connect(address=hana["host"], **login)
                with closing(connection), closing(connection.cursor()) as cursor:
                    cursor.execute('CREATE SCHEMA "VECTORS"')
                with Owl() as owl:
                    assert owl.service.sync.run("materials").upserted > 10
                yield
            finally:
                process.terminate()


def run(block: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    exec(compile(block, "docs/langchain.md", "exec"), {})
    return capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("workplace")
def test_reading_a_tables_rows(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(READING, capsys)
    assert len(lines) > 3
    assert all(re.match(r'-?\d\.\d{3} \["100","', line) for line in lines[:3]), lines


@pytest.mark.usefixtures("workplace")
def test_writing_by_id(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(WRITING, capsys) == ["['Conveyor belt mended.']", "['n2']"]


@pytest.mark.slow
@pytest.mark.usefixtures("workplace")
def test_langchain_hana_finds_in_our_table_what_we_find(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(THEIRS, capsys)
    assert len(lines) == 3
    for line in lines:
        theirs, ours, _ = line.split(" ", 2)
        assert float(theirs) == pytest.approx(float(ours), abs=2e-4)

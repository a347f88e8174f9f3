"""The blocks of docs/langchain.md marked `python run` do run, with the page's own configuration, on the stand-in."""

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

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "langchain.md").read_text(encoding="utf-8")
TOML = re.findall(r"^```toml\n(.*?)^```", PAGE, re.S | re.M)[0]
READING, WRITING, THEIRS = re.findall(r"^```python run\n(.*?)^```", PAGE, re.S | re.M)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder with the page's owl-sap.toml, synced from a stand-in, and an environment that leads to it."""
    folder = tmp_path_factory.mktemp("langchain")
    (folder / "owl-sap.toml").write_text(TOML)
    others = {name: text for name, text in os.environ.items() if not name.startswith(("HANA_", "OWL_SAP_"))}
    environment = others | {
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",  # other people's, of a process of its own
        "OWL_SAP_EMBEDDING__MODEL": "hash:384",
        "HANA_ENCRYPT": "false",
    }
    command = [sys.executable, "-m", "hana_emulator", "--port", "0", "--sample"]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            hana = json.loads(process.stdout.readline())
            environment |= {f"HANA_{name.upper()}": str(hana[name]) for name in ("host", "port", "user", "password")}
            login = {"address": hana["host"], "port": hana["port"], "user": hana["user"], "password": hana["password"]}
            with closing(dbapi.connect(**login, encrypt=False)) as connection, closing(connection.cursor()) as cursor:
                cursor.execute('CREATE SCHEMA "VECTORS"')
            synced = [sys.executable, "-m", "app", "sync", "materials", "--json"]
            subprocess.run(synced, cwd=folder, env=environment, check=True, capture_output=True, timeout=120)
            yield folder, environment
        finally:
            process.terminate()


def run(block: str, workplace: tuple[Path, dict[str, str]]) -> list[str]:
    folder, environment = workplace
    command = [sys.executable, "-c", block]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_reading_a_tables_rows(workplace: tuple[Path, dict[str, str]]) -> None:
    lines = run(READING, workplace)
    assert len(lines) > 3
    assert all(re.match(r'-?\d\.\d{3} \["100","', line) for line in lines[:3]), lines


def test_writing_by_id(workplace: tuple[Path, dict[str, str]]) -> None:
    assert run(WRITING, workplace) == ["['Conveyor belt mended.']", "['n2']"]


def test_langchain_hana_finds_in_our_table_what_we_find(workplace: tuple[Path, dict[str, str]]) -> None:
    lines = run(THEIRS, workplace)
    assert len(lines) == 3
    for line in lines:
        theirs, ours, _ = line.split(" ", 2)
        assert float(theirs) == pytest.approx(float(ours), abs=2e-4)

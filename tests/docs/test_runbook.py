"""docs/operations.md: its commands for backup and restore run as they stand there, and every alert has its section."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app.src.cli import app
from hana_emulator.testing import Emulator
from tests.forked import owl_sap

ROOT = Path(__file__).resolve().parents[2]
RUNBOOK = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
RULES = ROOT / "monitoring/prometheus/rules"
SETTINGS = """
[store]
kind = "local"
path = "store"
[embedding]
model = "hash:32"
[[collections]]
name = "materials"
source = "{schema}.MATERIALS"
template = "{{TEXT}}"
"""


def block(name: str) -> str:
    """The commands marked `<!-- tested: name -->`."""
    (found,) = re.findall(rf"<!-- tested: {name} -->\n```bash\n(.*?)```", RUNBOOK, re.S)
    return str(found)


class Deployment:
    """A folder with settings, a local store and a place for backups; `owl-sap` is on its PATH."""

    def __init__(self, emulator: Emulator, schema: str, folder: Path) -> None:
        self.folder = folder
        for name in ("bin", "backup"):
            (folder / name).mkdir()
        (folder / "owl-sap.toml").write_text(SETTINGS.format(schema=schema), encoding="utf-8")
        command = folder / "bin/owl-sap"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m app "$@"\n', encoding="utf-8")
        command.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OWL_SAP_", "HANA_"))}
        self.environment = kept | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "STORE": str(folder / "store"),
            "BACKUP": str(folder / "backup"),
            "HANA_HOST": emulator.host,
            "HANA_PORT": str(emulator.port),
            "HANA_ENCRYPT": "false",
            "HANA_USER": emulator.user,
            "HANA_PASSWORD": emulator.password,
        }

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def call(self, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> Result:
        """The command line in this process: a second is saved with each."""
        monkeypatch.chdir(self.folder)
        return CliRunner().invoke(app, arguments, env=self.environment)

    @contextmanager
    def serving(self) -> Iterator[str]:
        pipe = subprocess.PIPE
        with owl_sap(
            "serve", "--port", "0", cwd=self.folder, env=self.environment, stdout=pipe, stderr=pipe, text=True
        ) as process:
            assert process.stdout is not None
            try:
                yield json.loads(process.stdout.readline())["url"]
            finally:
                process.terminate()
                process.communicate(timeout=30)


def test_a_store_is_saved_while_it_serves_and_restored(
    emulator: Emulator, hana_schema: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_hana(sql: str) -> None:
        with closing(emulator.connect(currentSchema=hana_schema, autocommit=True)) as connection:
            connection.cursor().execute(sql)

    in_hana("CREATE TABLE MATERIALS (K INTEGER PRIMARY KEY, TEXT NVARCHAR(50))")
    in_hana("INSERT INTO MATERIALS VALUES (1, 'a pump')")
    place = Deployment(emulator, hana_schema, tmp_path)
    call = partial(place.call, monkeypatch=monkeypatch)
    assert call("sync", "--all").exit_code == 0
    with place.serving() as url:
        saved = place.run(block("backup"))
        assert saved.returncode == 0, saved.stderr
        with urllib.request.urlopen(f"{url}/health/ready", timeout=10) as answer:
            assert answer.status == 200, "nobody noticed"
    in_hana("INSERT INTO MATERIALS VALUES (2, 'a chair')")
    assert call("sync", "--all").exit_code == 0

    (tmp_path / "store/vectors.sqlite").write_bytes(b"not a database" * 1000)
    assert call("verify", "materials").exit_code == 3
    restored = place.run(block("restore"))
    assert restored.returncode == 0, restored.stderr
    assert call("verify", "materials").exit_code == 1, "the backup does not have the newer row"
    caught_up = place.run(block("catch up"))
    assert caught_up.returncode == 0, caught_up.stderr
    (hit,) = json.loads(call("search", "materials", "a chair", "-k", "1", "--json").stdout)
    assert hit["key"] == {"K": 2}


def test_a_backup_that_breaks_off_leaves_no_file_of_its_name(tmp_path: Path) -> None:
    """`mv` comes last, so that half a backup is never taken for one."""
    (tmp_path / "backup").mkdir()
    shutil.copy(ROOT / "LICENSE", tmp_path / "vectors.sqlite")
    script = f"STORE={tmp_path} BACKUP={tmp_path}/backup\n{block('backup')}"
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], capture_output=True, timeout=60, check=False)
    assert done.returncode != 0
    assert not (tmp_path / "backup/vectors.sqlite").exists()


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    alerts = re.findall(r"^\s*- alert: (\w+)$", "".join(file.read_text() for file in sorted(RULES.glob("*.yml"))), re.M)
    assert len(alerts) > 10
    sections = re.findall(r"^### Alert: (.+)\n\n`(\w+)`\. ", RUNBOOK, re.M)
    assert sorted(name for _, name in sections) == sorted(alerts)
    for title, name in sections:
        kebab = re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()
        assert title.lower().replace(" ", "-") == kebab, f"the anchor of {name} is alert-{kebab}"

"""docs/hana.md: what it tries with a delta table does what it says."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app.src.cli import app
from hana_emulator.testing import Emulator

PAGE = Path(__file__).resolve().parents[2] / "docs/hana.md"
SETTINGS = """
[store]
kind = "local"
path = "store"
[embedding]
model = "hash:32"
"""


def test_changes_by_a_delta_table(
    emulator: Emulator, hana_schema: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, walk = PAGE.read_text(encoding="utf-8").split("<!-- tested: delta -->")
    created, changed = (re.findall(r"^(.*);$", block, re.M) for block in re.findall(r"```sql\n(.*?)```", walk, re.S))
    (block,) = re.findall(r"```toml\n(.*?)```", walk, re.S)
    monkeypatch.chdir(tmp_path)
    Path("owl-sap.toml").write_text(SETTINGS + block.replace("DEMO", hana_schema), encoding="utf-8")

    def owl_sap(*arguments: str) -> Result:
        login = {name: str(getattr(emulator, name)) for name in ("host", "port", "user", "password")}
        variables = {f"HANA_{name.upper()}": value for name, value in login.items()} | {"HANA_ENCRYPT": "false"}
        done = CliRunner().invoke(app, arguments, env=variables)
        assert done.exit_code == 0, done.output
        return done

    with closing(emulator.connect(autocommit=True, currentSchema=hana_schema)) as connection:
        for statement in created:
            connection.cursor().execute(statement)
        assert "no full comparison has finished yet" in owl_sap("plan", "suppliers").stderr
        (first,) = json.loads(owl_sap("sync", "suppliers", "--json").stdout)
        assert (first["method"], first["upserted"], first["complete"]) == ("full", 2, True)
        for statement in changed:
            connection.cursor().execute(statement)
        assert "change detection: delta table\n" in owl_sap("plan", "suppliers").stderr
        (command,) = re.findall(r"`owl-sap (sync suppliers --max.*?)`", walk)
        (second,) = json.loads(owl_sap(*command.split(), "--json").stdout)
        found = (second["method"], second["read"], second["upserted"], second["deleted"])
        assert found == ("delta", 1, 1, 1)
        proposed = json.loads(owl_sap("introspect", f"{hana_schema}.SUPPLIERS", "--json").stdout)
        assert (proposed["key"], proposed["changes"]["method"]) == (["ID"], "delta")

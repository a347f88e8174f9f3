"""Run the walks of docs/hana.md on the emulator with its sample tables."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app.src.cli import app
from hana_emulator.testing import Emulator, running

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/hana.md").read_text(encoding="utf-8")
OwlSap = Callable[..., Result]
LOCAL = """
[store]
kind = "local"
path = "store"
[embedding]
model = "hash:32"
"""


def block(name: str) -> str:
    """The block marked `<!-- tested: name -->`."""
    (found,) = re.findall(rf"<!-- tested: {name} -->\n```\w+\n(.*?)```", PAGE, re.S)
    return str(found)


def execute(emulator: Emulator, *statements: str) -> None:
    with closing(emulator.connect(autocommit=True)) as connection:
        for statement in statements:
            connection.cursor().execute(statement)


@pytest.fixture(scope="module")
def sample() -> Iterator[Emulator]:
    with running("--sample") as emulator:
        yield emulator


@pytest.fixture
def owl_sap(sample: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OwlSap:
    """`owl-sap` in an empty folder, on the emulator; it must end with 0."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("HANA_", "OWL_SAP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HANA_ENCRYPT", "false")
    for name in ("host", "port", "user", "password"):
        monkeypatch.setenv(f"HANA_{name.upper()}", str(getattr(sample, name)))

    def run(*arguments: str) -> Result:
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, (arguments, done.output)
        return done

    return run


def walk(owl_sap: OwlSap, name: str) -> dict[str, str]:
    """Run the commands of a block; return their outputs by verb."""
    outputs = {}
    for line in block(name).splitlines():
        program, *arguments = re.findall(r'"[^"]*"|\S+', line.partition("#")[0])
        assert program == "owl-sap"
        outputs[arguments[0]] = owl_sap(*(argument.strip('"') for argument in arguments)).output
    return outputs


def active_model(owl_sap: OwlSap) -> str:
    (row,) = json.loads(owl_sap("status", "--json").stdout)
    return str(row["model"])


def test_collections_with_models_of_hana_and_of_a_remote_source(sample: Emulator, owl_sap: OwlSap) -> None:
    execute(sample, 'CREATE SCHEMA "VECTORS"')
    settings = Path("owl-sap.toml")
    settings.write_text(re.sub('"hana:.*?"', '"hash:32"', block("settings")), encoding="utf-8")
    owl_sap("sync", "materials")
    settings.write_text(block("settings"), encoding="utf-8")
    outputs = walk(owl_sap, "walk")
    assert list(outputs) == ["doctor", "plan", "sync", "verify", "search"]
    assert active_model(owl_sap).startswith("hash:32")
    compare, switch = re.findall(r"`owl-sap (generations materials --\w+)`", PAGE)
    assert '"serving":1,"other":2' in owl_sap(*compare.split()).output
    owl_sap(*switch.split())
    assert active_model(owl_sap).startswith("hana:SAP_GXY")
    owl_sap("verify", "materials")
    assert "SENDS TEXTS AWAY" not in outputs["doctor"]
    assert "calls may be charged" in outputs["plan"]
    assert "Calls may be charged." in PAGE
    remote = re.sub(r'^model = "hana:.*?\n', block("remote settings"), block("settings"), flags=re.M)
    assert "remote_source" in remote
    settings.write_text(remote, encoding="utf-8")
    outputs = walk(owl_sap, "remote walk")
    assert list(outputs) == ["doctor", "plan", "sync", "generations", "verify", "search"]
    assert "SENDS TEXTS AWAY" in outputs["doctor"]
    assert "AI_CORE" in outputs["doctor"]
    assert active_model(owl_sap).startswith("hana:text-embedding-3-small@")


def test_changes_by_delta_tables(sample: Emulator, owl_sap: OwlSap) -> None:
    _, walk = PAGE.split("<!-- tested: delta -->")
    (settings,) = re.findall(r"```toml\n(.*?)```", walk, re.S)
    (changes,) = re.findall(r"```sql\n(.*?)```", walk, re.S)
    Path("owl-sap.toml").write_text(LOCAL + settings, encoding="utf-8")
    assert "no full comparison has finished yet" in owl_sap("plan", "suppliers").stderr
    first = json.loads(owl_sap("sync", "--all", "--json").stdout)
    assert [(run["method"], run["upserted"], run["complete"]) for run in first] == [("full", 3, True)] * 2
    execute(sample, *re.findall(r"^(.*);$", changes, re.M))
    planned = owl_sap("plan", "suppliers").stderr
    for said in re.findall(r"`owl-sap plan suppliers` now says `(.*?)`, and `(.*?)`", walk)[0]:
        assert said in planned
    (command,) = re.findall(r"`owl-sap (sync --all --max.*?)`", walk)
    second = json.loads(owl_sap(*command.split(), "--json").stdout)
    found = [(run["method"], run["read"], run["upserted"], run["deleted"]) for run in second]
    assert found == [("delta", 1, 1, 1)] * 2
    for table, key in (("SUPPLIERS", ["ID"]), ("T001W", ["MANDT", "WERKS"])):
        proposed = json.loads(owl_sap("introspect", f"SAPDEMO.{table}", "--json").stdout)
        assert (proposed["key"], proposed["changes"]["method"]) == (key, "delta")

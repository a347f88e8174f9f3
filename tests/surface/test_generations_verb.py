"""`owl-sap generations` over the emulator: from a changed model to the switch and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from app.src.cli import app
from tests.adversity.scene import Scene

pytest.importorskip("hdbcli")

ROWS, EMPTY = 40, 2
WIDE = {"OWL_SAP_EMBEDDING__MODEL": "hash:128"}


@pytest.fixture(params=["hana"])
def scene(request: pytest.FixtureRequest, make_scene: Callable[..., Scene]) -> Scene:
    scene = make_scene(request.param, rows=ROWS)
    scene.sync()
    return scene


def document(scene: Scene, *arguments: str, code: int = 0, **more: Any) -> Any:
    done, out, errors = scene.verb(*arguments, "--json", env=WIDE, **more)
    assert done == code, errors
    return json.loads(out)


def listed(scene: Scene) -> list[tuple[int, str, bool, int, int]]:
    found = document(scene, "generations", "rows")
    return [tuple(each[name] for name in ("generation", "state", "complete", "rows", "dimension")) for each in found]


def test_from_a_changed_model_to_the_switch_and_back(scene: Scene) -> None:
    stored = ROWS - EMPTY
    (report,) = document(scene, "sync", "rows")
    assert (report["collection"], report["generation"], report["upserted"]) == ("rows", 2, stored)
    assert (report["serving"]["unchanged"], report["serving"]["embedded_texts"]) == (stored, 0)
    assert listed(scene) == [(1, "active", True, stored, 64), (2, "building", True, stored, 128)]
    (hit,) = document(scene, "search", "rows", "pump 12 of plant 5", "-k", "1")
    assert hit["key"] == {"K": 12}
    (scene.folder / "queries.txt").write_text("pump 3\n\n  plant 6 \n", encoding="utf-8")
    compared = document(scene, "generations", "rows", "--compare", "--queries", "queries.txt", "--sample", "10")
    assert (compared["serving"], compared["other"], compared["queries"]) == (1, 2, 12)
    assert 0.0 < compared["overlap_at_10"] <= 1.0
    assert document(scene, "verify", "rows", "--generation", "2")["ok"]
    switched = document(scene, "generations", "rows", "--switch")
    assert switched == {"collection": "rows", "generation": 2, "retired": 1, "notes": []}
    (status,) = document(scene, "status", "rows")
    assert (status["generation"], status["dimension"], status["rows"]) == (2, 128, stored)
    (hit,) = document(scene, "search", "rows", "pump 12 of plant 5", "-k", "1")
    assert hit["key"] == {"K": 12}
    assert document(scene, "generations", "rows", "--rollback")["generation"] == 1
    assert document(scene, "generations", "rows", "2", "--switch")["retired"] == 1
    assert document(scene, "generations", "rows", "--drop", "1") == {"collection": "rows", "dropped": 1}
    assert listed(scene) == [(2, "active", True, stored, 128)]
    (report,) = document(scene, "sync", "rows")
    assert ("generation" in report, report["unchanged"], report["embedded_texts"]) == (False, stored, 0)
    if scene.kind == "hana":
        tables = scene.run(f"SELECT TABLE_NAME FROM SYS.TABLES WHERE SCHEMA_NAME = '{scene.schema}'")
        assert {name for (name,) in tables if name.startswith("OWL_ROWS")} == {"OWL_ROWS_G2"}


def test_another_type_of_vectors_built_on_request(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WIDE, "OWL_SAP_EMBEDDING__MODEL", "hash:64")  # as the collection has it
    assert document(scene, "generations", "rows", "--build")["generation"] == 2
    monkeypatch.setitem(WIDE, "OWL_SAP_STORE__VECTOR_TYPE", "half")
    kept = "generation 2 was begun with another [store] vector_type and keeps it"
    (report,) = document(scene, "sync", "rows")
    assert (report["generation"], report["notes"][0].startswith(kept)) == (2, True), report["notes"]
    document(scene, "generations", "rows", "--drop", "2")
    (report,) = document(scene, "sync", "rows")
    assert ("generation" in report, report["embedded_texts"]) == (False, 0), "the setting alone changes nothing"
    report = document(scene, "generations", "rows", "--build")
    assert (report["generation"], any("vector_type" in note for note in report["notes"])) == (3, False)
    compared = document(scene, "generations", "rows", "--compare")
    assert compared["overlap_at_10"] > 0.95
    document(scene, "generations", "rows", "--switch")
    (status,) = document(scene, "status", "rows")
    assert status["table"] == "OWL_ROWS_H3"
    assert document(scene, "verify", "rows")["ok"]
    (report,) = document(scene, "sync", "rows")
    assert report["embedded_texts"] == 0


@pytest.mark.parametrize("scene", ["local"], indirect=True)
def test_a_template_built_on_request(scene: Scene) -> None:
    assert scene.verb("sync", "rows")[0] == 0
    settings = scene.folder / "owl-sap.toml"
    settings.write_text(settings.read_text().replace('"{TXT}"', '"{TXT} ({GRP})"'))
    code, out, errors = scene.verb("--output", "table", "generations", "rows", "--build")
    assert (code, "--switch" in errors) == (0, True), errors
    assert "built" in out
    code, out, _ = scene.verb("generations", "rows")
    assert [json.loads(line)["template"] for line in out.splitlines()] == ["{TXT}", "{TXT} ({GRP})"]
    code, out, _ = scene.verb("--output", "table", "generations", "rows", "--compare")
    assert (code, "overlap at 10" in out) == (0, True)


@pytest.mark.parametrize("scene", ["local"], indirect=True)
def test_refusals(scene: Scene) -> None:
    def refused(code: int, why: str, *arguments: str, name: str = "rows") -> None:
        done, out, errors = scene.verb("generations", name, *arguments, "--json", env=WIDE)
        assert (done, out) == (code, ""), arguments
        assert why in errors, errors

    refused(2, 'did you mean "rows"', name="rowz")
    refused(2, "give only one of: --build or --switch", "--build", "--switch")
    refused(2, "none.txt: No such file", "--compare", "--queries", "none.txt")
    refused(1, "is being built", "--switch")
    refused(2, "there are: 1", "--switch", "5")
    code, out, errors = scene.verb("verify", "rows", "--generation", "5")
    assert (code, out, "there are: 1" in errors) == (2, "", True)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--drop"], "--drop N"),
        (["3", "--rollback"], "a number goes with"),
        (["--force"], "--force goes with"),
        (["--queries", "q.txt"], "--queries with --compare"),
        (["--compare", "--rollback"], "give only one of: --compare or --rollback"),
    ],
)
def test_options_that_exclude_each_other(arguments: list[str], why: str) -> None:
    run = CliRunner().invoke(app, ["generations", "rows", *arguments])
    assert (run.exit_code, why in run.stderr) == (2, True)

"""`owl-sap quarantine` over the emulator and both stores: from a row that cannot be stored to one that is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.adversity.scene import EMPTY, ROWS, Scene

pytest.importorskip("hdbcli")

BAD = (4, 5)
TOML = """
[[collections]]
name = "bad"
source = "{schema}.BAD"
template = "{{TXT}}"
metadata = ["META"]
"""
CANARY = "canary"
SLOW_LOCAL, SLOW_HANA = (pytest.param(kind, marks=pytest.mark.slow) for kind in ("local", "hana"))


@pytest.fixture(params=["hana"])
def scene(request: pytest.FixtureRequest, make_scene: Callable[..., Scene]) -> Scene:
    """Rows 4 and 5 of table BAD have more metadata than is kept."""
    scene = make_scene(request.param)
    with (scene.folder / "owl-sap.toml").open("a") as file:
        file.write(TOML.format(schema=scene.schema))
    scene.run('CREATE COLUMN TABLE "BAD" ("A" NVARCHAR(3), "B" INTEGER, "TXT" NVARCHAR(50), "META" NCLOB, '
              'PRIMARY KEY ("A", "B"))')  # fmt: skip
    rows = [("100", n, f"valve number {n}", CANARY * 20_000 if n in BAD else "M") for n in range(8)]
    scene.run('INSERT INTO "BAD" VALUES (?, ?, ?, ?)', *rows)
    code, out, _ = scene.verb("sync", "bad", "--json")
    assert (code, json.loads(out)[0]["quarantined"]) == (0, 2)
    return scene


def document(scene: Scene, *arguments: str, code: int = 0) -> Any:
    done, out, errors = scene.verb("quarantine", *arguments, "--json")
    assert done == code, errors
    assert CANARY not in out + errors
    return json.loads(out)


def mend(scene: Scene, *numbers: int) -> None:
    scene.run('UPDATE "BAD" SET "META" = \'M\' WHERE "B" = ?', *[(number,) for number in numbers])


def numbers(scene: Scene) -> list[tuple[int, int]]:
    """Key and attempts of what is in quarantine."""
    return [(entry["key"]["B"], entry["attempts"]) for entry in document(scene, "list", "bad")]


@pytest.mark.parametrize("scene", ["hana", SLOW_LOCAL], indirect=True)
def test_from_quarantine_to_a_hit(scene: Scene) -> None:
    first, _ = document(scene, "list", "bad")
    assert set(first) == {"key", "stage", "reason", "attempts", "given_up", "last_seen"}
    assert (first["key"], first["stage"], first["attempts"]) == ({"A": "100", "B": 4}, "render", 1)
    assert first["last_seen"].endswith("+00:00")
    assert document(scene, "show", "bad", "B=4") == [first]
    code, out, _ = scene.verb("quarantine", "show", "bad", '["100", 4]')
    assert code == 0
    assert "bytes as JSON" in out
    mend(scene, 4)
    report = document(scene, "retry", "bad", code=1)
    assert (report["retried"], report["upserted"], report["quarantined"]) == (2, 1, 1)
    assert numbers(scene) == [(5, 1)]
    _, out, _ = scene.verb("search", "bad", "valve number 4", "-k", "1", "--json")
    assert json.loads(out)[0]["key"] == first["key"]
    mend(scene, 5)
    assert document(scene, "retry", "bad", '{"A": "100", "B": 5}')["upserted"] == 1
    assert numbers(scene) == []
    assert scene.verb("verify", "bad")[0] == 0


@pytest.mark.parametrize("scene", [SLOW_HANA, "local"], indirect=True)
def test_what_left_the_source_leaves_quarantine(scene: Scene) -> None:
    scene.run('DELETE FROM "BAD" WHERE "B" = 4')
    report = document(scene, "retry", "bad", "A=100,B=4")
    assert (report["gone"], report["quarantined"]) == (1, 0)
    assert numbers(scene) == [(5, 1)]


@pytest.mark.parametrize("scene", [SLOW_HANA, "local"], indirect=True)
def test_what_is_dropped_is_met_again(scene: Scene) -> None:
    assert document(scene, "drop", "bad", "B=5") == {"collection": "bad", "dropped": 1}
    assert numbers(scene) == [(4, 1)]
    assert document(scene, "drop", "bad")["dropped"] == 1
    assert document(scene, "drop", "bad")["dropped"] == 0
    assert numbers(scene) == []
    assert scene.verb("sync", "bad", "--strict")[0] == 1
    assert numbers(scene) == [(4, 1), (5, 1)]


@pytest.mark.parametrize("scene", ["local"], indirect=True)
def test_refusals(scene: Scene) -> None:
    for words in (["list"], ["show"], ["retry"], ["drop"]):
        code, out, errors = scene.verb("quarantine", *words, "bat")
        assert (code, out) == (2, "")
        assert 'did you mean "bad"' in errors
    for verb in ("show", "retry", "drop"):
        for key, why in (
            ("B=99", "no row in quarantine"),
            ('["100"]', "no row in quarantine"),
            ("4", "key columns: A, B"),
            ('["100",', "not JSON"),
        ):
            code, out, errors = scene.verb("quarantine", verb, "bad", key)
            assert (code, out) == (2, ""), (verb, key)
            assert why in errors
    assert numbers(scene) == [(4, 1), (5, 1)]


@pytest.mark.parametrize("scene", ["local"], indirect=True)
def test_a_collection_that_was_never_synced_has_none(scene: Scene) -> None:
    assert document(scene, "list", "rows") == []
    code, out, _ = scene.verb("sync", "rows", "--json")
    assert (code, json.loads(out)[0]["upserted"]) == (0, ROWS - EMPTY)
    assert document(scene, "retry", "rows")["retried"] == 0

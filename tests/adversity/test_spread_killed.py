"""The proof by kills (`kills.py`) in small, and that its checks find what is wrong."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from app.src.benchmark.harness import Report
from app.src.service.wiring import EngineEmbedder
from hana_emulator.testing import Emulator
from tests.adversity.kills import TABLE, TARGETS, Versions, covers, fill, owl_sap, spread, violations
from tests.adversity.scene import NAME, Scene

ROWS, KILLS, SEED = 20_000, 20, 1


@pytest.mark.slow
@pytest.mark.proves(32, 33, 37)
@pytest.mark.timeout(900)
def test_kills_of_workers_nodes_and_drivers_cost_no_row() -> None:
    report = Report("kills")
    given = argparse.Namespace(rows=ROWS, kills=KILLS, seed=SEED, actors=4, page=200)
    figures = {figure.name: figure.median for figure in spread(given, report)}
    print(json.dumps(figures))
    assert sum(count for name, count in figures.items() if name.startswith("killed: ")) == KILLS
    assert figures["killed: node"] * figures["killed: driver"] > 0
    for name, (_, goal) in TARGETS.items():
        assert figures[name] <= goal, (name, report.notes)


DAMAGE = {  # statement: what is found
    f'DELETE FROM "{TABLE}" WHERE "SRC_KEY" = \'[0]\'': "[0] should be",
    f"""UPDATE "{TABLE}" SET "VEC_TEXT" = 'pump 2 of plant 2 in state 7' WHERE "SRC_KEY" = '[2]'""": "[2] should be",
    f'DELETE FROM "{TABLE}" WHERE "SRC_KEY" = \'[6]\' AND "CHUNK_NO" = 1': "[6] should be",
    f'UPDATE "{TABLE}" SET "VEC_META" = \'{{"GRP":"G7"}}\' WHERE "SRC_KEY" = \'[8]\'': "[8] has the metadata",
    f'INSERT INTO "{TABLE}" ("SRC_KEY", "CHUNK_NO", "VEC_TEXT", "VEC_META", "VEC_VECTOR", "CONTENT_HASH", "MODEL_ID") '
    f'SELECT "SRC_KEY", "CHUNK_NO", "VEC_TEXT", "VEC_META", "VEC_VECTOR", "CONTENT_HASH", "MODEL_ID" FROM "{TABLE}" '
    "WHERE \"SRC_KEY\" = '[10]'": "[10] should be",
    f'UPDATE "{TABLE}" SET "VEC_VECTOR" = (SELECT "VEC_VECTOR" FROM "{TABLE}" WHERE "SRC_KEY" = \'[14]\') '
    "WHERE \"SRC_KEY\" = '[12]'": "the vector of 'pump 12 of plant 5 in state 0' is another",
    'DELETE FROM "ROWS" WHERE "K" = 16': "[16] is stored, and is no row",
    f'UPDATE "{TABLE}" SET "MODEL_ID" = \'other\' WHERE "SRC_KEY" = \'[18]\'': "models",
    "INSERT INTO OWL_QUARANTINE VALUES ('rows', '[20]', 'embed', 'none', 1, NULL, NULL)": "OWL_QUARANTINE has 1 rows",
    'CREATE TABLE "OWL_LEASE_PARTS" AS (SELECT * FROM "OWL_QUARANTINE")': "OWL_LEASE_PARTS has 1 rows",
    "UPDATE OWL_STATE SET LEASE_OWNER = 'another', LEASE_UNTIL = ADD_SECONDS(CURRENT_UTCTIMESTAMP, 9)": (
        "another still has the lease of rows"
    ),
}


def test_each_damage_is_found(emulator: Emulator, hana_schema: str, hashing: EngineEmbedder, tmp_path: Path) -> None:
    with closing(Scene(emulator, hana_schema, "hana", tmp_path / "scene", hashing, rows=1)) as scene:
        fill(scene, 120, 50)
        with owl_sap(scene, "sync", NAME, errors=None) as process:
            process.communicate()
        assert list(violations(scene, hashing)) == []
        for statement in DAMAGE:
            scene.run(statement)
        found = list(violations(scene, hashing))
    wanted = [*DAMAGE.values(), "`owl-sap verify` exits with 1", "a sync of 119 unchanged rows"]
    assert [what for what in wanted if not any(what in each for each in found)] == [], found


def test_chunks_that_leave_something_out_do_not_cover_a_text() -> None:
    text = "one two three four"
    assert covers([(0, "one two"), (1, "two three"), (2, "four")], text)
    for wrong in ([(0, "one two"), (1, "four")], [(0, "one two three")], [(1, "one two three four")], []):
        assert not covers(wrong, text)


class Cursor:
    """What is stored: the records, and the ids of rows."""

    def __init__(self) -> None:
        self.records: list[tuple[int, str, str]] = []
        self.ids: list[str] = []

    def execute(self, sql: str, parameters: object) -> None:
        self._found: list[Any] = [(id_,) for id_ in self.ids] if sql.startswith('SELECT "SRC_KEY"') else self.records

    def fetchall(self) -> list[Any]:
        return self._found


def test_a_row_that_goes_back_or_comes_again_is_found() -> None:
    cursor, versions = Cursor(), Versions(10)

    def look(version: int, *deleted: int) -> list[str]:
        cursor.records = [(1, "[1]", "pump 1"), (2, "[1]", f"pump 1 in state {version}")]
        return list(versions.look(cursor, deleted))

    assert [look(version) for version in (0, 0, 2, 2)] == [[]] * 4
    assert look(1) == ["row 1 was in version 2, then in version 1"]
    cursor.ids = ["[1]"]
    assert look(1, 1) == []
    cursor.ids = []
    assert look(1, 1) == []
    assert look(1, 1) == ["row 1 was gone, then in version 1"]

"""Damage of every kind is planted behind a store's back; `verify` finds each as what it is, `--repair` mends exactly
that and leaves every other record where it was, foreign ones included.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hdbcli import dbapi

from connector.model import StoredRecord
from connector.sync.verify import VerifyReport, verify
from tests.adversity.scene import NAME, Scene
from tests.slow import slow, slow_but

KINDS = ("missing", "stale", "orphaned", "duplicates", "bad_vectors")
TABLE = '"OWL_ROWS_G1"'


class Vandal:
    """Writes to the tables of either store without asking anybody. `document` is a key of the source table."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.local = scene.kind == "local"

    def run(self, sql: str, *parameters: Any) -> None:
        if not self.local:
            self.scene.run(sql, parameters) if parameters else self.scene.run(sql)
            return
        with closing(sqlite3.connect(self.scene.folder / "vectors" / "vectors.sqlite")) as db, db:
            assert db.execute(sql, parameters).rowcount > 0

    def set(self, document: int, number: int, column: str, value: Any) -> None:
        """`column` of TEXT, META, HASH, MODEL."""
        theirs = {"TEXT": "VEC_TEXT", "META": "VEC_META", "HASH": "CONTENT_HASH", "MODEL": "MODEL_ID"}[column]
        if self.local:
            sql = f"UPDATE records SET {column} = ? WHERE document = ? AND number = ?"
            self.run(sql, value, f"[{document}]", number)
        else:
            where = 'WHERE "SRC_KEY" = ? AND "CHUNK_NO" = ?'
            self.run(f'UPDATE {TABLE} SET "{theirs}" = ? {where}', value, f"[{document}]", number)

    def forget(self, document: int) -> None:
        """Its hash no longer says of what it was made, only of which vector."""
        (record,) = (record for record in records(self.scene).values() if record.id == f"[{document}]")
        self.set(document, 0, "HASH", bytes(24) + (record.content_hash or b"")[24:])

    def delete(self, document: int, number: int) -> None:
        if self.local:
            self.run("DELETE FROM records WHERE document = ? AND number = ?", f"[{document}]", number)
        else:
            self.run(f'DELETE FROM {TABLE} WHERE "SRC_KEY" = ? AND "CHUNK_NO" = ?', f"[{document}]", number)

    def vector(self, document: int, vector: np.ndarray) -> None:
        data = vector.astype("<f4").tobytes()
        if self.local:
            self.run(
                "UPDATE vectors SET vector = ?, dimension = ? WHERE record = "
                "(SELECT id FROM records WHERE document = ? AND number = 0)",
                *(data, len(vector), f"[{document}]"),
            )
        else:
            head = len(vector).to_bytes(4, "little")
            where = 'WHERE "SRC_KEY" = ? AND "CHUNK_NO" = 0'
            self.run(f'UPDATE {TABLE} SET "VEC_VECTOR" = ? {where}', head + data, f"[{document}]")

    def copy(self, document: int) -> None:
        """A chunk twice: only a table without a unique index takes it."""
        columns = '"VEC_TEXT", "VEC_META", "VEC_VECTOR", "SRC_KEY", "CHUNK_NO", "CONTENT_HASH", "MODEL_ID"'
        self.run(f"INSERT INTO {TABLE} ({columns}) SELECT {columns} FROM {TABLE} WHERE \"SRC_KEY\" = '[{document}]'")


def unit(place: int) -> np.ndarray:
    vector = np.zeros(64, dtype=np.float32)
    vector[place] = 1
    return vector


Damage = Callable[[Vandal], None]
DAMAGE: dict[str, tuple[str, Damage]] = {
    "a lost document": ("missing", lambda vandal: vandal.delete(0, 0)),
    "another text": ("stale", lambda vandal: vandal.set(1, 0, "TEXT", "a text that the row never had")),
    "other metadata": ("stale", lambda vandal: vandal.set(2, 0, "META", '{"GRP":"G9"}')),
    "another hash": ("stale", lambda vandal: vandal.forget(4)),
    "another model": ("stale", lambda vandal: vandal.set(14, 0, "MODEL", "another-model@00000000")),
    "no model": ("stale", lambda vandal: vandal.set(13, 0, "MODEL", None)),
    "a torn document": ("stale", lambda vandal: vandal.delete(3, 1)),
    "another direction": ("bad_vectors", lambda vandal: vandal.vector(5, unit(7))),
    "another length": ("bad_vectors", lambda vandal: vandal.vector(6, 2 * unit(3))),
    "all zeros": ("bad_vectors", lambda vandal: vandal.vector(8, np.zeros(64))),
    "not a number": ("bad_vectors", lambda vandal: vandal.vector(9, np.full(64, np.nan))),
    "another dimension": ("bad_vectors", lambda vandal: vandal.vector(10, np.eye(32)[0])),
    "a chunk twice": ("duplicates", lambda vandal: vandal.copy(11)),
}
MOST_TELLING = ("a lost document", "another text", "a torn document", "another direction", "not a number")
"""Alone; all are found and mended together through the command line."""
IMPOSSIBLE = {
    "local": {
        "a chunk twice": "its table is unique by document and number, and no other program writes it",
        "no model": "the column is never NULL",
    },
    "hana": {"another dimension": "the column has a fixed dimension"},
}


def plant_orphan(vandal: Vandal) -> None:
    vandal.scene.run('DELETE FROM "ROWS" WHERE "K" = 12')


def plant_foreign(scene: Scene) -> int:
    """What langchain-hana would write into the same table; the local store's is ours alone."""
    if scene.kind == "local":
        return 0
    text = "[" + ",".join(["1"] + ["0"] * 63) + "]"
    scene.run(
        f'INSERT INTO {TABLE} ("VEC_TEXT", "VEC_META", "VEC_VECTOR") '
        f"VALUES ('theirs', '{{}}', TO_REAL_VECTOR('{text}'))"
    )
    return 1


def records(scene: Scene) -> dict[int, StoredRecord]:
    return {record.record: record for page in scene.store().records(NAME) for record in page}


def same(one: StoredRecord, other: StoredRecord) -> bool:
    plain = ("id", "number", "content_hash", "model", "text", "metadata")
    vectors = [record.vector.tobytes() if record.vector is not None else b"" for record in (one, other)]
    return vectors[0] == vectors[1] and all(getattr(one, name) == getattr(other, name) for name in plain)


def found(report: VerifyReport | dict[str, Any]) -> dict[str, int]:
    given: dict[str, Any] = report if isinstance(report, dict) else report.as_dict()
    return {kind: given[kind] for kind in KINDS if given[kind]}


@pytest.mark.parametrize("name", slow_but(DAMAGE, *MOST_TELLING))
def test_one_damage_is_found_and_mended(scene: Scene, name: str) -> None:
    scene.sync()
    foreign = plant_foreign(scene)
    healthy = records(scene)
    kind, damage = DAMAGE[name]
    if name in IMPOSSIBLE[scene.kind]:
        with pytest.raises((dbapi.Error, sqlite3.Error)):  # the table itself takes no such damage
            damage(Vandal(scene))
        return
    damage(Vandal(scene))
    ends = scene.ends()
    report = verify(scene.spec, ends)
    assert (found(report), report.ok, report.foreign) == ({kind: 1}, False, foreign)
    mended = verify(scene.spec, ends, repair=True)
    assert (found(mended), mended.ok, mended.repaired, mended.foreign) == ({kind: 1}, True, 1, foreign)
    after = records(scene)
    moved = {record.id for number, record in healthy.items() if number not in after or not same(record, after[number])}
    assert len(moved) <= 1, "others were touched"
    by_place = {(record.id, record.number): record for record in after.values()}
    assert len(by_place) == len(after) == len(healthy)
    assert all(same(record, by_place[record.id, record.number]) for record in healthy.values())


@pytest.mark.parametrize("scene", ["hana", *slow("local")], indirect=True)
def test_all_damage_at_once_through_the_command_line(scene: Scene) -> None:
    scene.sync()
    foreign = plant_foreign(scene)
    wanted = {"orphaned": 1}
    vandal = Vandal(scene)
    for name, (kind, damage) in DAMAGE.items():
        if name not in IMPOSSIBLE[scene.kind]:
            damage(vandal)
            wanted[kind] = wanted.get(kind, 0) + 1
    plant_orphan(vandal)
    code, out, errors = scene.verb("verify", NAME, "--json")
    assert (code, found(json.loads(out)), json.loads(out)["ok"]) == (1, wanted, False), errors
    code, out, errors = scene.verb("verify", NAME, "--repair", "--json")
    report = json.loads(out)
    assert (code, report["ok"], report["repaired"]) == (0, True, sum(wanted.values())), errors
    assert (found(report), report["foreign"]) == (wanted, foreign), "as found"
    code, out, errors = scene.verb("verify", NAME, "--json")
    assert (code, found(json.loads(out))) == (0, {}), errors

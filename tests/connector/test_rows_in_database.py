"""A sync of rows that stay in HANA: what it fetches, and that it stores what a sync through this process stores."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from connector.errors import ConnectionLost, LeaseLost, NoKey, Overloaded, StatementFailed
from connector.hana.connection import HanaPool, Session
from connector.hana.source import HanaSource
from connector.model import ChangeSpec, TableRef
from connector.stores.hana.in_database import RowsInDatabase
from connector.stores.hana.store import HanaStore
from connector.sync import apply, run
from connector.sync.in_database import InDatabaseRun
from connector.sync.plan import PlanOptions, plan
from connector.sync.run import Ends, sync
from connector.sync.verify import verify
from tests.connector.test_hana_embedding import ANY, ROWS, Scene, change, failing, scene_in
from tests.native import login, native  # noqa: F401 - the fixture

SRC, STORED = '"NATIVE"."SRC"', '"NATIVE"."OWL_NATIVE_G1"'
LONG = "a pump with a long text " * 50


@pytest.fixture
def scene(native) -> Iterator[Scene]:  # noqa: F811
    with scene_in(native) as scene:
        yield scene


@pytest.fixture
def fetched(monkeypatch) -> list[object]:
    """Every value that HANA returned."""
    values: list[object] = []
    real = Session.query

    def query(self, sql, *rest, **more):
        rows = real(self, sql, *rest, **more)
        values.extend(value for row in rows for value in row)
        return rows

    monkeypatch.setattr(Session, "query", query)
    return values


@contextmanager
def through_us() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "rows_in_sql", lambda *_: "")
        yield


def content(scene: Scene) -> dict:
    return {id_: (r.number, r.text, r.metadata, r.content_hash[:16], r.model) for id_, r in scene.stored().items()}


def counts(report) -> tuple[int, ...]:
    assert report.read == report.upserted + report.unchanged + report.empty + report.quarantined + report.superseded
    return report.loaded, report.upserted, report.unchanged, report.empty, report.quarantined, report.deleted


def test_no_row_is_fetched(scene, fetched):
    report = scene.sync(page_rows=7)
    assert counts(report) == (0, ROWS, 0, 0, 0, 0)
    assert report.embedded_texts == ROWS
    assert "30 of 30 rows stayed in HANA" in report.notes
    assert counts(scene.sync(page_rows=7)) == (0, 0, ROWS, 0, 0, 0)
    change(scene, 3, "another pump")
    change(scene, 4, " \n ")
    scene.run(f"""UPDATE {SRC} SET "GRP" = 'M' WHERE "K" = 5""")
    scene.run(f"""DELETE FROM {SRC} WHERE "K" = 6""")
    scene.run(f"""INSERT INTO {SRC} VALUES (99, 'a new pump', NULL)""")
    changed = scene.sync()
    assert counts(changed) == (0, 3, ROWS - 4, 1, 0, 1)
    assert changed.embedded_texts == 2
    assert not [value for value in fetched if isinstance(value, str) and "pump" in value]
    assert counts(scene.sync()) == (0, 0, ROWS - 1, 1, 0, 0)
    assert verify(scene.spec, scene.ends).ok
    assert scene.ends.store.status("native").checkpoint.rows_read == ROWS


def test_vectors_of_half_precision(scene):
    scene.ends = replace(scene.ends, store=HanaStore(scene.pool, "NATIVE", vector_type="half"))
    assert counts(scene.sync()) == (0, ROWS, 0, 0, 0, 0)
    assert any("TO_HALF_VECTOR(L2NORMALIZE(VECTOR_EMBEDDING(" in sql for sql in scene.sent)
    assert counts(scene.sync()) == (0, 0, ROWS, 0, 0, 0)
    with through_us():
        assert scene.sync().unchanged == ROWS
    assert verify(scene.spec, scene.ends).ok


def test_it_stores_what_a_sync_through_us_stores_and_each_leaves_the_others_rows(scene):
    change(scene, 1, 'a "pump"\\ with\nbreaks, ü and \U0001f600  ')
    scene.sync()
    inside = content(scene)
    with through_us():
        report = scene.sync()
        assert (report.unchanged, report.embedded_texts) == (ROWS, 0)
        assert content(scene) == inside
        scene.run(f"DROP TABLE {STORED}")
        scene.run('DELETE FROM "NATIVE"."OWL_STATE"')
        assert scene.sync().embedded_texts == ROWS
    assert content(scene) == inside
    assert counts(scene.sync()) == (0, 0, ROWS, 0, 0, 0)
    fresh = scene.expected(*(record.text for record in scene.stored().values()))
    np.testing.assert_allclose([record.vector for record in scene.stored().values()], fresh, atol=1e-5)


def test_rows_that_hana_cannot_finish_pass_through_us_and_the_others_stay(scene):
    change(scene, 2, LONG)
    report = scene.sync()
    assert counts(report) == (1, ROWS, 0, 0, 0, 0)
    assert report.embedded_texts > ROWS
    assert counts(scene.sync()) == (1, 0, ROWS, 0, 0, 0)
    scene.sent.clear()
    scene.run(f"""UPDATE {SRC} SET "TXT" = ?""", LONG)
    assert counts(scene.sync()) == (ROWS, ROWS - 1, 1, 0, 0, 0)
    assert not [sql for sql in scene.sent if 'OR ("K" = ?)' in sql], "read by pages"
    for key in range(ROWS):
        change(scene, key, f"pump {key} leaks")
    scene.sync()
    change(scene, 2, "short again")
    assert counts(scene.sync()) == (0, 1, ROWS - 1, 0, 0, 0)
    assert verify(scene.spec, scene.ends).ok


def test_rows_that_pass_through_us_are_not_remembered(scene, monkeypatch):
    real, remembered = InDatabaseRun._finish, []

    def finish(self):
        remembered.append(len(self._written))
        real(self)

    monkeypatch.setattr(InDatabaseRun, "_finish", finish)
    scene.run(f"""UPDATE {SRC} SET "TXT" = ?""", LONG)
    assert scene.sync().loaded == ROWS
    assert remembered == [0]


@pytest.mark.parametrize("word", ["poison", "mute"])
def test_a_rejected_row_is_quarantined_until_it_heals(scene, word):
    change(scene, 9, f"{word} text")
    first = scene.sync(page_rows=10)
    assert (first.upserted, first.quarantined, first.loaded) == (ROWS - 1, 1, 10)
    assert sum("some rows left HANA, which did not write them together: " in note for note in first.notes) == 1
    again = scene.sync()
    assert counts(again) == (1, 0, ROWS - 1, 0, 1, 0)
    assert again.notes == [f"{ROWS - 1} of {ROWS} rows stayed in HANA"]
    assert [row.attempts for row in scene.ends.store.quarantine("native")] == [2]
    change(scene, 9, "healed")
    assert counts(scene.sync()) == (1, 1, ROWS - 1, 0, 0, 0)
    assert scene.ends.store.quarantine("native") == []
    change(scene, 9, f"{word} again")
    assert scene.sync().quarantined == 1
    scene.run(f"""DELETE FROM {SRC} WHERE "K" = 9""")
    assert counts(scene.sync()) == (0, 0, ROWS - 1, 0, 0, 0)
    assert scene.ends.store.quarantine("native") == []


def test_too_many_deletions_pause_it(scene):
    scene.sync()
    scene.run(f'DELETE FROM {SRC} WHERE "K" < 10')
    report = scene.sync(max_deletes=0.2)
    assert (report.paused, report.to_delete, report.deleted) == ("max_deletes", 10, 0)
    scene.run(f"""UPDATE {SRC} SET "TXT" = '' WHERE "K" < 25""")
    report = scene.sync(max_deletes=0.4)
    assert (report.paused, report.deleted, report.empty, report.emptied) == ("max_deletes", 0, 15, 15)
    assert len(scene.stored()) == ROWS
    assert scene.sync(max_deletes=1.0).deleted == 10
    assert len(scene.stored()) == 5


@pytest.mark.parametrize(("left", "limited"), [(3, False), (ROWS, True)], ids=["within the limit", "a reload"])
def test_rows_that_leave_while_deletions_are_counted(scene, monkeypatch, left, limited):
    scene.sync()
    scene.run(f'DELETE FROM {SRC} WHERE "K" = 1')
    real = RowsInDatabase.gone_ids

    def emptied(self):
        scene.run(f'DELETE FROM {SRC} WHERE "K" < ?', left)
        return real(self)

    monkeypatch.setattr(RowsInDatabase, "gone_ids", emptied)
    report = scene.sync(max_deletes=0.2)
    paused, deleted = ("max_deletes", 0) if limited else (None, left)
    assert (report.paused, report.to_delete, report.deleted) == (paused, left, deleted)
    assert len(scene.stored()) == ROWS - deleted


def test_a_row_that_leaves_during_the_first_sync_does_not_pause_it(scene, monkeypatch):
    real = RowsInDatabase.gone

    def leaving(self):
        scene.run(f'DELETE FROM {SRC} WHERE "K" = 1')
        return real(self)

    monkeypatch.setattr(RowsInDatabase, "gone", leaving)
    report = scene.sync(max_deletes=0.2)
    assert (report.paused, report.deleted, len(scene.stored())) == (None, 1, ROWS - 1)


def test_a_row_that_changes_within_a_transaction_is_stored_once(scene, monkeypatch):
    scene.sync()
    change(scene, 3, "another pump")
    real, records = Session.execute, f'SELECT COUNT(*), COUNT(DISTINCT "SRC_KEY") FROM {STORED}'

    def execute(self, sql, *rest, **more):
        done = real(self, sql, *rest, **more)
        if sql.startswith(f"DELETE FROM {STORED}"):
            change(scene, 4, "changed after the DELETE")
        return done

    monkeypatch.setattr(Session, "execute", execute)
    assert counts(scene.sync()) == (0, 1, ROWS - 1, 0, 0, 0)
    assert scene.run(records) == [(ROWS, ROWS)]
    assert counts(scene.sync()) == (0, 1, ROWS - 1, 0, 0, 0)
    assert verify(scene.spec, scene.ends).ok


def test_a_stop_ends_a_range_after_a_transaction(scene, monkeypatch):
    monkeypatch.setattr(apply, "FIRST_EMBEDDED", 4)
    scene.sent.clear()
    report = sync(scene.spec, scene.ends, ANY, stop=lambda: any("VECTOR_EMBEDDING" in sql for sql in scene.sent))
    assert (report.stopped, report.upserted, len(scene.stored())) == (True, 4, 4)
    assert not [sql for sql in scene.sent if sql.startswith(("MERGE", "DELETE FROM " + STORED))], "nothing to replace"
    assert counts(scene.sync()) == (0, ROWS - 4, 4, 0, 0, 0)


def test_transactions_are_bounded_and_grow(scene, monkeypatch):
    monkeypatch.setattr(apply, "FIRST_EMBEDDED", 2)
    monkeypatch.setattr(apply, "GROW_AFTER", 2)
    real, written = Session.execute, []

    def counted(self, sql, *rest, **more):
        changed = real(self, sql, *rest, **more)
        written.extend([changed] * ("VECTOR_EMBEDDING" in sql))
        return changed

    monkeypatch.setattr(Session, "execute", counted)
    assert scene.sync().upserted == ROWS
    assert written == [2, 2, 4, 4, 8, 8, 2]


def test_damaged_records_are_written_again(scene):
    scene.sync()
    names = '"VEC_TEXT", "VEC_META", "VEC_VECTOR", "SRC_KEY", "CHUNK_NO", "CONTENT_HASH", "MODEL_ID"'
    scene.run(f"""INSERT INTO {STORED} ({names}) SELECT {names} FROM {STORED} WHERE "SRC_KEY" = '[1]'""")
    scene.run(f"""UPDATE {STORED} SET "CONTENT_HASH" = NULL WHERE "SRC_KEY" = '[2]'""")
    scene.run(f"""UPDATE {STORED} SET "CHUNK_NO" = 1 WHERE "SRC_KEY" = '[3]'""")
    assert counts(scene.sync()) == (0, 3, ROWS - 3, 0, 0, 0)
    assert verify(scene.spec, scene.ends).ok


def test_a_lost_lease_writes_nothing(scene, monkeypatch):
    scene.sync()
    change(scene, 3, "another pump")
    real = Session.execute

    def taken(self, sql, *rest, **more):
        done = real(self, sql, *rest, **more)
        if "VECTOR_EMBEDDING" in sql:
            real(self, 'UPDATE "NATIVE"."OWL_STATE" SET "LEASE_EPOCH" = "LEASE_EPOCH" + 1')
        return done

    monkeypatch.setattr(Session, "execute", taken)
    with pytest.raises(LeaseLost):
        scene.sync()
    assert scene.stored()["[3]"].text == "pump 3 leaks"


def test_rows_are_counted_whose_commit_lost_its_reply(scene, monkeypatch):
    real, lost = Session.commit, [1, 1]

    def commit(self, doing):
        real(self, doing)
        if lost and doing.startswith("writing"):
            lost.pop()
            self.broken = True
            raise ConnectionLost("gone", code=-10807)

    monkeypatch.setattr(Session, "commit", commit)
    report = scene.sync()
    assert (counts(report), report.embedded_texts) == ((0, ROWS, 0, 0, 0, 0), ROWS)
    scene.run(f"""UPDATE {SRC} SET "GRP" = 'M' WHERE "K" < 5""")
    lost.append(1)
    assert counts(scene.sync()) == (0, 5, ROWS - 5, 0, 0, 0)


@pytest.mark.parametrize("error", [StatementFailed("down", code=8), ConnectionLost("gone", code=-10807)])
def test_a_failing_service_quarantines_nothing_and_a_lost_connection_is_tried_again(scene, monkeypatch, error):
    scene.sync()
    change(scene, 3, "another pump")
    for name in ("execute", "execute_many", "query"):
        real = getattr(Session, name)

        def failing(self, sql, *rest, real=real, errors=[error], **more):  # noqa: B006 - one for each method
            if "VECTOR_EMBEDDING" in sql and (errors or isinstance(error, StatementFailed)):
                raise (errors.pop() if errors else error)
            return real(self, sql, *rest, **more)

        monkeypatch.setattr(Session, name, failing)
    if isinstance(error, StatementFailed):
        with pytest.raises(StatementFailed, match="down"):
            scene.sync()
        assert scene.stored()["[3]"].text == "pump 3 leaks"
    else:
        assert scene.sync().upserted == 1
    assert scene.ends.store.quarantine("native") == []


@pytest.mark.parametrize(
    ("part", "errors", "fetched", "said"),
    [
        ('TOP 1 "HASH"', [StatementFailed("no such function")], ROWS, "HANA does not render them: no such function"),
        ('TOP 1 "HASH"', [Overloaded("memory")] * 99, ROWS, "HANA does not render them: memory"),
        ('GROUP BY "STATE"', [StatementFailed("a text")], 10, f"{ROWS - 10} of {ROWS} rows stayed in HANA"),
        ('GROUP BY "STATE"', [Overloaded("memory")] * 99, ROWS, f"0 of {ROWS} rows stayed in HANA"),
    ],
    ids=["a function", "memory on trial", "a text", "memory"],
)
def test_rows_that_hana_fails_to_render_pass_through_us(scene, monkeypatch, part, errors, fetched, said):
    failing(monkeypatch, part, list(errors))
    report = scene.sync(page_rows=10)
    assert (report.loaded, report.upserted) == (fetched, ROWS)
    assert any(said in note for note in report.notes)
    assert sum(str(errors[0]) in note for note in report.notes) == 1
    monkeypatch.undo()
    assert counts(scene.sync()) == (0, 0, ROWS, 0, 0, 0)


def test_keys_that_hana_fails_to_examine_make_rows_leave(scene, monkeypatch):
    scene.run(f"""ALTER TABLE {SRC} ADD ("KEY" NVARCHAR(20) DEFAULT 'k' NOT NULL)""")
    scene.run(f'UPDATE {SRC} SET "KEY" = TO_NVARCHAR("K")')
    scene.spec = replace(scene.spec, key=("KEY",))
    failing(monkeypatch, '"KEY" LIKE_REGEXPR', [StatementFailed("no such function")])
    report = scene.sync()
    assert (report.loaded, report.upserted) == (ROWS, ROWS)
    assert "the rows leave HANA: HANA does not render them: no such function" in report.notes


def test_blank_rows_are_deleted_although_hana_never_renders_all_texts_at_once(scene):
    scene.sync(page_rows=10)
    for key in (4, 14):
        change(scene, key, "")
    scene.sent.clear()
    assert counts(scene.sync(page_rows=10)) == (0, 0, ROWS - 2, 2, 0, 0)
    assert len(scene.stored()) == ROWS - 2
    rendering = [sql for sql in scene.sent if "REPLACE_REGEXPR" in sql and "SELECT TOP 1" not in sql]
    assert len(rendering) > 3
    assert all('"K" <= ?' in sql or '"K" > ?' in sql for sql in rendering)


def test_a_key_that_is_not_unique_is_refused(scene):
    scene.run('CREATE VIEW "NATIVE"."V" AS SELECT MOD("K", 20) AS "K", "TXT", "GRP" FROM "NATIVE"."SRC"')
    scene.spec = replace(scene.spec, source=TableRef("NATIVE", "V"), key=("K",))
    with pytest.raises(NoKey, match="does not identify"):
        scene.sync()
    scene.run('CREATE TABLE "NATIVE"."D" ("K" INTEGER, "TXT" NVARCHAR(20), "GRP" NVARCHAR(3))')
    scene.run("""INSERT INTO "NATIVE"."D" VALUES (1, 'a pump', NULL)""")
    scene.spec = replace(scene.spec, source=TableRef("NATIVE", "D"))
    assert scene.sync().upserted == 1
    scene.run("""INSERT INTO "NATIVE"."D" VALUES (1, 'another text', NULL)""")
    with pytest.raises(NoKey, match="does not identify"):
        scene.sync()
    assert [record.text for record in scene.stored().values()] == ["a pump"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"template": "{TXT} {F}"}, "column 'F' is a DOUBLE"),
        ({"changes": ChangeSpec(hash="server")}, "changes are found by the method hash"),
        ({"key": ("KEY",)}, "1 keys are too long or contain control characters"),
    ],
)
def test_a_sync_and_a_plan_say_why_rows_leave(scene, changed, reason):
    scene.run(f'ALTER TABLE {SRC} ADD ("F" DOUBLE, "KEY" NVARCHAR(20))')
    scene.run(f"""UPDATE {SRC} SET "F" = 0.1, "KEY" = TO_NVARCHAR("K")||CASE WHEN "K" = 1 THEN NCHAR(7) ELSE '' END""")
    scene.spec = replace(scene.spec, **changed)
    first = "this run stores a token of every row" if "changes" in changed else reason
    assert any(f"the rows leave HANA: {first}" in note for note in scene.sync().notes)
    report, planned = scene.sync(), plan(scene.spec, scene.ends.source, scene.ends.store, scene.ends.embedder)
    assert f"the rows leave HANA: {reason}" in report.notes
    assert f"the rows leave HANA: {reason}" in planned.notes


def test_the_setting_makes_rows_leave_and_a_later_sync_finds_them_unchanged(scene):
    report = scene.sync(rows_stay=False)
    assert (report.loaded, report.upserted) == (ROWS, ROWS)
    planned = plan(scene.spec, scene.ends.source, scene.ends.store, scene.ends.embedder, PlanOptions(rows_stay=False))
    for notes in (report.notes, planned.notes):
        assert "the rows leave HANA: the setting sync.rows_stay is false" in notes
    assert counts(scene.sync()) == (0, 0, ROWS, 0, 0, 0)


def test_a_plan_says_that_rows_stay(scene, native):  # noqa: F811
    assert "a sync leaves the rows in HANA" in plan(scene.spec, scene.ends.source, None, scene.ends.embedder).notes
    with HanaPool(login(native)) as pool:  # without the current schema: another login
        ends = Ends(HanaSource(pool), scene.ends.store, scene.ends.embedder)
        found = plan(scene.spec, ends.source, ends.store, ends.embedder)
        assert "the rows leave HANA: source and store have different logins" in found.notes


def test_random_changes_and_both_ways_of_a_sync_agree(scene):
    chance = random.Random(20)
    texts = ["pump", "a, b", "", " \x01 ", "\ufeffa pump", "poison", "mute", LONG, 'q"\\\n', "ü\U0001f600", None]
    for _ in range(8):
        for key in chance.sample(range(ROWS + 10), 8):
            scene.run(f'DELETE FROM {SRC} WHERE "K" = ?', key)
            if chance.random() < 0.8:
                group = chance.choice(["A", "B ", None])
                scene.run(f"INSERT INTO {SRC} VALUES (?, ?, ?)", key, chance.choice(texts), group)
        if chance.random() < 0.3:
            with through_us():
                counts(scene.sync())
        else:
            counts(scene.sync(page_rows=chance.choice([3, 1000])))
        assert verify(scene.spec, scene.ends).ok
        with through_us():
            assert scene.sync().embedded_texts == 0

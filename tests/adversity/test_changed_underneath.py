"""The source changes its shape or empties itself while it is read: nothing is deleted that a person has not seen."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from connector.errors import ConfigurationError, UnknownTable
from connector.model import CollectionStatus
from connector.sync.run import Ends, SyncReport, sync
from connector.sync.verify import verify
from tests.adversity.scene import EMPTY, NAME, ROWS, Scene, WatchedSource
from tests.slow import slow

FULL = ROWS - EMPTY


def interrupted(scene: Scene, page: int, *statements: str, **options: object) -> SyncReport:
    """A sync that finds the table changed by `statements` before it reads the page of that number."""

    def change(number: int) -> None:
        if number == page:
            for sql in statements:
                scene.run(sql)

    plain = scene.ends()
    return scene.sync(Ends(WatchedSource(scene.pool(), change), plain.store, plain.embedder), **options)


def status(scene: Scene) -> CollectionStatus:
    found = scene.store().status(NAME)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("page", "statement", "named"),
    [
        (3, 'DROP TABLE "ROWS"', "ROWS"),
        (4, 'ALTER TABLE "ROWS" DROP ("TXT")', "TXT"),
        *slow(
            (6, 'DROP TABLE "ROWS"', "ROWS"),
            (6, 'RENAME TABLE "ROWS" TO "OLD_ROWS"', "ROWS"),
            (4, 'ALTER TABLE "ROWS" DROP ("GRP")', "GRP"),
            (1, 'DROP TABLE "ROWS"', "ROWS"),
            (1, 'ALTER TABLE "ROWS" DROP ("TXT")', "TXT"),
        ),
    ],
)
@pytest.mark.proves(23)
def test_a_table_or_column_dropped_in_the_middle(scene: Scene, page: int, statement: str, named: str) -> None:
    scene.sync()
    before, checkpoint = scene.content(), status(scene).last_sync
    report = interrupted(scene, page, statement)
    assert (report.paused, report.deleted) == ("schema_changed", 0)
    assert any(named in note for note in report.notes)
    assert scene.content() == before
    assert status(scene).last_sync == checkpoint


def test_what_was_read_before_the_table_went_is_kept(scene: Scene) -> None:
    report = interrupted(scene, 5, 'DROP TABLE "ROWS"')
    assert report.paused == "schema_changed"
    assert 38 <= len(scene.content()) <= 78
    assert status(scene).last_sync is None


@pytest.mark.proves(11)
def test_a_table_emptied_in_the_middle_pauses_the_deletions(scene: Scene) -> None:
    scene.sync()
    report = interrupted(scene, 3, 'DELETE FROM "ROWS"')
    assert (report.read, report.deleted, report.paused) == (40, 0, "max_deletes")
    assert report.to_delete == FULL - 38
    assert len(scene.content()) == FULL


@pytest.mark.proves(11)
def test_a_source_that_is_empty_today(scene: Scene) -> None:
    scene.sync()
    scene.run('DELETE FROM "ROWS"')
    report = scene.sync()
    assert (report.read, report.to_delete, report.deleted, report.paused) == (0, FULL, 0, "max_deletes")
    checked = verify(scene.spec, scene.ends(), repair=True)
    assert (checked.orphaned, checked.ok) == (FULL, False)
    assert len(scene.content()) == FULL
    assert scene.sync(max_deletes=1.0).deleted == FULL
    assert scene.content() == {}


@pytest.mark.parametrize(("gone", "paused"), [(23, None), (24, "max_deletes")])
def test_the_brake_is_a_share_of_what_is_stored(scene: Scene, gone: int, paused: str | None) -> None:
    """0.2 of 116 stored rows are 23.2."""
    scene.sync()
    keys = sorted(int(json.loads(id_)[0]) for id_ in scene.content())[:gone]
    scene.run('DELETE FROM "ROWS" WHERE "K" = ?', *[(key,) for key in keys])
    report = scene.sync()
    assert (report.to_delete, report.deleted, report.paused) == (gone, 0 if paused else gone, paused)


@pytest.mark.proves(11)
def test_rows_that_come_and_go_while_they_are_read(scene: Scene) -> None:
    """Behind the reader: found by the next run. Before it: found by this one. No row is doubled or lost for good."""
    report = interrupted(
        scene,
        4,
        """INSERT INTO "ROWS" VALUES (-5, 'behind the reader', 'G')""",
        """INSERT INTO "ROWS" VALUES (1000, 'before the reader', 'G')""",
        'DELETE FROM "ROWS" WHERE "K" IN (10, 110)',
        """UPDATE "ROWS" SET "TXT" = 'moved on' WHERE "K" IN (11, 111)""",
    )
    assert (report.read, report.upserted) == (ROWS, FULL)  # one less before the reader, one more
    after = scene.sync()
    assert (after.upserted, after.deleted, after.unchanged) == (2, 1, FULL - 2)
    assert scene.converges().unchanged == FULL


ON_ONE_STORE = pytest.mark.parametrize("scene", ["local"], indirect=True)


@ON_ONE_STORE
@pytest.mark.proves(23)
def test_a_column_of_another_type_pauses_until_somebody_accepts_it(scene: Scene) -> None:
    scene.sync()
    before, checkpoint = scene.content(), status(scene).last_sync
    scene.run('ALTER TABLE "ROWS" ALTER ("GRP" NVARCHAR(3), "TXT" NCLOB)')
    code, out, errors = scene.verb("sync", NAME, "--json")
    (report,) = json.loads(out)
    assert (code, report["paused"], report["read"]) == (1, "schema_changed", 0)
    assert "TXT was NVARCHAR and is NCLOB" in errors
    assert "--accept-schema" in errors
    assert (scene.content(), status(scene).last_sync) == (before, checkpoint)
    assert scene.store().view(NAME).search(scene.embedder.embed_query("pump 5"), 3)
    code, out, _ = scene.verb("sync", NAME, "--accept-schema", "--json")
    (report,) = json.loads(out)
    assert (code, report["paused"], report["deleted"]) == (0, None, 0)
    assert scene.sync().paused is None


@ON_ONE_STORE
def test_what_never_was_there_is_a_slip_in_the_settings(scene: Scene) -> None:
    scene.run('ALTER TABLE "ROWS" DROP ("TXT")')
    code, _, errors = scene.verb("sync", NAME)
    assert (code, "TXT" in errors) == (2, True)
    scene.run('DROP TABLE "ROWS"')
    with pytest.raises(UnknownTable, match="ROWS"):
        scene.sync()


def test_a_column_that_only_where_uses(scene: Scene) -> None:
    """Dropped, it pauses; misspelt by the operator, it is his error."""
    scene.run('ALTER TABLE "ROWS" ADD ("FLAG" INTEGER)')
    filtered = replace(scene.spec, where='"FLAG" IS NULL')
    assert sync(filtered, scene.ends()).upserted == FULL
    scene.run('ALTER TABLE "ROWS" DROP ("FLAG")')
    assert sync(filtered, scene.ends()).paused == "schema_changed"
    with pytest.raises(ConfigurationError, match="where"):
        sync(replace(scene.spec, where='"FLAGG" IS NULL'), scene.ends())
    assert len(scene.content()) == FULL


@pytest.mark.proves(23)
def test_a_table_that_changes_after_its_last_page_deletes_nothing(scene: Scene) -> None:
    scene.sync()
    scene.run('DELETE FROM "ROWS" WHERE "K" = 5')
    report = interrupted(scene, 7, 'RENAME COLUMN "ROWS"."GRP" TO "GROUPED"')
    assert (report.paused, report.deleted) == ("schema_changed", 0)
    assert len(scene.content()) == FULL


@pytest.mark.proves(23, 24)
def test_a_widened_column_is_no_change_of_the_rows(scene: Scene) -> None:
    scene.sync()
    scene.run('ALTER TABLE "ROWS" ADD ("MORE" NVARCHAR(10))')
    assert scene.sync().unchanged == FULL

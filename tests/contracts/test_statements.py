"""Every statement shape that production code sends to HANA stands in docs/hana-sql.md with its source in SAP's
documentation, and the list holds no shape that is no longer sent.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from app.src.core.loading import EngineOptions, load_engine
from app.src.jobs.journal import Journal
from app.src.jobs.store_records import StoreRecords
from app.src.service.wiring import EngineEmbedder
from connector.discovery import introspection, labels
from connector.errors import ConnectorError, StatementFailed
from connector.hana import catalog, change_log
from connector.hana.connection import ConnectionOptions, HanaFeatures, HanaPool, utc_now
from connector.hana.privileges import effective
from connector.hana.reranking import cross_encode
from connector.hana.source import HanaSource
from connector.model import (
    ChangeSet,
    ChangeSpec,
    Checkpoint,
    CollectionSpec,
    Column,
    DatabaseModel,
    ModelSource,
    Order,
    Place,
    QuarantinedRow,
    Query,
    Recipe,
    Span,
    TableRef,
)
from connector.stores.hana.store import HanaStore
from connector.stores.state import LeaseTimes
from connector.sync.run import Ends, SyncOptions, sync
from connector.sync.verify import verify
from tests.native import NEB, embedder_of

LIST = Path(__file__).resolve().parents[2] / "docs" / "hana-sql.md"
FILTERS = [
    None,
    {"A": "x"},
    {"A": None},
    {"A": {"$ne": "x"}},
    {"A": {"$ne": None}},
    {"B": {"$gt": 1}},
    {"B": {"$gte": 1}},
    {"B": {"$lt": 1}},
    {"B": {"$lte": 1}},
    {"B": {"$between": [1, 2]}},
    {"A": {"$in": ["a", "b"]}},
    {"A": {"$nin": ["a", "b"]}},
    {"A": {"$like": "a%"}},
    {"A": {"$contains": "word"}},
    {"F": True},
    {"D": {"$gt": {"type": "date", "date": "2026-01-31"}}},
    {"$or": [{"A": "x"}, {"$and": [{"B": 1}, {"B": 2}]}]},
]
WITHIN = {"A": {"$in": ["0", "1"]}}
"""As `access.rows.visible` writes what somebody may see."""


def shape(sql: str, schema: str) -> str:
    """A statement without this test's names: <S> the schema, <C> a collection's table, <T> a source table or view."""
    sql = re.sub(r"\s+", " ", sql).strip().replace(f'"{schema}"', "<S>")
    sql = re.sub(r'"OWL_[A-Z]+_[GH]\d(_[A-Z]+)?"', lambda match: f"<C{(match[1] or '').lower()}>", sql)
    sql = sql.replace('"OWL_STATE"', "<STATE>").replace('"OWL_QUARANTINE"', "<QUARANTINE>")
    sql = sql.replace('"OWL_LEASE_PARTS"', "<PARTS>")
    sql = sql.replace('"SRC"', "<T>").replace('"NULLS"', "<T>").replace('"CLIENTS"', "<T>").replace('"MOVING"', "<T>")
    sql = sql.replace('"MOVING_Delta"', "<D>")
    sql = sql.replace('"STAMPED"', "<T>").replace('"STAMPED_TOO"', "<T>").replace('"KEYLESS"', "<T>")
    sql = re.sub(r'"OWL_LOG_[A-Z]+(_[IUD])?"', lambda match: f"<L{(match[1] or '').lower()}>", sql)
    sql = re.sub(r"'OWL_[0-9a-f]{32}'", "'OWL_x'", sql)
    sql = re.sub(r"TOP \d+", "TOP n", sql)
    sql = re.sub(r"_VECTOR\(\d+\)", "_VECTOR(n)", sql)
    sql = re.sub(r"TO_NVARCHAR\(\?\)(, TO_NVARCHAR\(\?\))+", "TO_NVARCHAR(?), ...", sql)
    sql = re.sub(r"IN \(\?(, \?)*\)", "IN (?, ...)", sql)
    holds = re.escape("""SCORE(TO_NVARCHAR(?) IN ("VEC_TEXT" EXACT SEARCH MODE 'text')) > 0""")
    sql = re.sub(rf"\(({holds})( OR {holds}){{4,5}}\)", r"(\1 OR ...)", sql)  # a number with and without its zeros
    sql = re.sub(r'( UNION ALL SELECT \d+ AS "PLACE", TO_NVARCHAR\(\?\) AS "TEXT" FROM DUMMY)+', " UNION ALL ...", sql)
    sql = re.sub(r'("SRC_KEY" LIKE \?)( OR "SRC_KEY" LIKE \?)* THEN', r"\1 OR ... THEN", sql)
    return re.sub(r'(\("A" = \? AND "B" = \?\))( OR \("A" = \? AND "B" = \?\))+', r"\1 OR ...", sql)


PARTS = {
    "<ID>": r"""'\['\|\|COALESCE\('"'\|\|REPLACE\(.*?, 'null'\)\|\|'\]'""",
    "<ROWS>": r"""SELECT "K0", "K1", "SRC_KEY", "VEC_TEXT".*?\)\)\)(?=\) AS "R"|\)$)""",
    "<IDS>": r"""SELECT <ID> FROM .*?(?=\) GROUP BY|\) AND COALESCE|\)$)""",
    "<COMPARED>": r"""SELECT "R".*?ON "Q"."SRC_KEY" = "R"."SRC_KEY\"""",
}


def shapes(sql: str, schema: str) -> Iterator[str]:
    """The statement's shape, and those of its parts that render rows or compare them."""
    whole = re.sub(r"X'[0-9A-F]{32}'", "X'...'", shape(sql, schema))
    for name, part in PARTS.items():
        for found in re.findall(part, whole):
            ranged = "FROM <S>.<T> WHERE <RANGE>" + ")))" * (name == "<ROWS>")
            yield re.sub(r"FROM <S>\.<T>.*", ranged, found)
        whole = re.sub(part, name, whole)
    yield whole


def listed() -> set[str]:
    blocks = re.findall(r"^```sql\n(.*?)\n```$", LIST.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return {statement for block in blocks for statement in block.splitlines()}


@pytest.fixture(scope="module")
def recorded(emulator, shared_schema) -> list[str]:
    sent: list[str] = []
    login = ConnectionOptions(
        host=emulator.host,
        port=emulator.port,
        user=emulator.user,
        password=emulator.password,
        schema=shared_schema,
        encrypt=False,
    )
    hana = emulator.connect(currentSchema=shared_schema)
    hana.cursor().execute(
        'CREATE TABLE "SRC" ("A" NVARCHAR(5), "B" INTEGER, "F" BOOLEAN, "D" DATE, "TXT" NVARCHAR(99), '
        'PRIMARY KEY ("A", "B"))'
    )
    engine = load_engine(EngineOptions(model="hash:16"))
    with HanaPool(login, on_statement=sent.append, idle_check=0.0) as pool:
        exercise(pool, hana, shared_schema, EngineEmbedder(engine))
        job_records(pool, shared_schema, sent)
    engine.close()
    hana.close()
    return sent


def exercise(pool: HanaPool, hana, schema: str, embedder: EngineEmbedder) -> None:
    """Everything that the connector can do to a HANA, once."""
    assert effective(pool)[0]
    source, store = HanaSource(pool), HanaStore(pool, schema, index_from=5)
    spec = CollectionSpec(
        "statements", TableRef(schema, "SRC"), "{TXT}", metadata=("A", "B", "F", "D"), where='"B" >= 0'
    )
    insert(hana, [(str(n % 2), n, True, "2026-02-01", f"text {n}") for n in range(20)])
    options = SyncOptions(page_rows=7, max_deletes=1.0)
    ends = Ends(source, store, embedder)
    sync(spec, ends, options)
    hana.cursor().execute('UPDATE "SRC" SET "F" = FALSE WHERE "B" = 3')
    hana.cursor().execute('DELETE FROM "SRC" WHERE "B" = 4')
    hana.commit()
    sync(spec, ends, options)
    with store.lease(spec.name, "test", 5) as lease:
        store.apply(lease, ChangeSet(quarantined=[QuarantinedRow("[1]", "embed", "for the test")]))
        store.apply(lease, ChangeSet(released=["[2]"]))
        store.apply(lease, ChangeSet(checkpoint=Checkpoint(mark={"at": 1}), partial=True))
        part = store.begin_part(lease, 1)
        store.apply(part, ChangeSet(released=["[2]"]))
        store.end_parts(part)
        store.end_parts(lease)
    list(store.stored(spec.name, ['["0",2]', '["1",3]']))
    verify(spec, ends, repair=True)
    for condition in FILTERS:
        store.view(spec.name).search(embedder.embed_query("text 3"), 3, condition)
    for condition in (None, {"A": "x"}, {"B": {"$gt": 1}}):
        store.view(spec.name, row_filter=WITHIN).search(embedder.embed_query("text 3"), 3, condition)
    by_words(pool, store, schema, spec.name)
    cross_encode(pool, "SAP_CER.20250701", "text", ["text 3", "text 4"])
    read(store, spec.name)
    store.view(spec.name).search(embedder.embed_query("text 3"), 3, exact=True)
    store.view(spec.name).index_use(3)
    store.status(spec.name)
    source.rows(Query(spec.source, ("A", "B"), ("TXT",)), [("0", 2), ("1", 3)])
    HanaFeatures.probe(pool)
    assert abs((utc_now(pool) - datetime.now(UTC)).total_seconds()) < 60
    ways_to_find_changes(pool, hana, schema, embedder)
    changed_settings(pool, schema)
    generations(pool, hana, schema)
    hanas_own_models(pool, hana, schema)
    half_precision(pool, schema, embedder)
    views_and_wrong_names(pool, hana, schema)
    discovered(pool, hana, schema)


def ways_to_find_changes(pool: HanaPool, hana: Any, schema: str, embedder: EngineEmbedder) -> None:
    """Each method once over everything and once over what changed; the change log put in and taken out."""
    hana.cursor().execute(
        'CREATE COLUMN TABLE "MOVING" ("A" NVARCHAR(5), "B" INTEGER, "TXT" NVARCHAR(99), '
        '"AT" TIMESTAMP, "NUMBER" BIGINT, PRIMARY KEY ("A", "B"))'
    )
    hana.cursor().execute(
        'CREATE COLUMN TABLE "MOVING_Delta" '
        '("A" NVARCHAR(5), "B" INTEGER, "Change_Type" NVARCHAR(1), "Change_Date" TIMESTAMP)'
    )
    hana.commit()
    log = CollectionSpec("moving", TableRef(schema, "MOVING"), "{TXT}", changes=ChangeSpec("log"))
    change_log.install(pool, log, "X")
    methods = (
        ChangeSpec("watermark", "AT", delay=0),
        ChangeSpec("watermark", "NUMBER", delay=0),
        ChangeSpec(hash="server"),
        ChangeSpec("rowid"),
        ChangeSpec("log"),
        ChangeSpec("delta", delay=0),
    )
    ends = Ends(HanaSource(pool), HanaStore(pool, schema), embedder)
    insert = """INSERT INTO "MOVING" VALUES ('a', ?, 'text', ADD_SECONDS(CURRENT_UTCTIMESTAMP, ?), ?)"""
    hana.cursor().executemany(insert, [(number, 0, number) for number in range(20)])
    hana.commit()
    for number, method in enumerate(methods, 100):
        spec = replace(log, changes=method)
        sync(spec, ends, SyncOptions(page_rows=7, max_deletes=1.0))
        hana.cursor().executemany(insert, [(number * 100 + more, 0, number * 100 + more) for more in range(9)])
        hana.cursor().execute(
            'INSERT INTO "MOVING_Delta" SELECT "A", "B", \'I\', CURRENT_UTCTIMESTAMP FROM "MOVING" WHERE "B" >= ?',
            (number * 100,),
        )
        hana.commit()
        assert sync(spec, ends, SyncOptions(page_rows=7, max_deletes=1.0)).method != "full"
    change_log.remove(pool, log, "X")
    records = Query(TableRef(schema, "MOVING_Delta"), ("A", "B", "Change_Type"), ())
    midnight = "2026-01-01 00:00:00.0000000"
    after_a_record = Span(Column("Change_Date", "TIMESTAMP"), midnight, ("a", 1, "I"), midnight)
    assert ends.source.capture.record_types(records, after_a_record) == ({}, 0)


def discovered(pool: HanaPool, hana: Any, schema: str) -> None:
    """Lists of tables, and introspection of tables with and without a key, and of a view over clients."""
    hana.cursor().execute('CREATE VIEW "CLIENTS" AS SELECT \'100\' AS "MANDT", "TXT" FROM "SRC"')
    hana.cursor().execute('CREATE TABLE "KEYLESS" ("A" INTEGER NOT NULL UNIQUE, "TXT" NVARCHAR(99))')
    texts = '"TXT" NVARCHAR(99), "CHANGED_AT"'
    hana.cursor().execute(f'CREATE TABLE "STAMPED" ("A" INTEGER PRIMARY KEY, {texts} TIMESTAMP)')
    hana.cursor().execute(f'CREATE TABLE "STAMPED_TOO" ("A" INTEGER PRIMARY KEY, {texts} DECIMAL(15))')
    hana.commit()
    assert HanaSource(pool).table_id(TableRef(schema, "CLIENTS"))
    catalog.tables(pool)
    catalog.tables(pool, schema, "S")
    for name in ("SRC", "CLIENTS", "KEYLESS", "STAMPED", "STAMPED_TOO"):
        introspection.introspect(pool, TableRef(schema, name))
    hana.cursor().execute(
        'CREATE TABLE "T134T" ("MANDT" NVARCHAR(3), "SPRAS" NVARCHAR(1), "MTART" NVARCHAR(4), "MTBEZ" NVARCHAR(9))'
    )
    hana.cursor().execute('CREATE TABLE "T001W" ("MANDT" NVARCHAR(3), "WERKS" NVARCHAR(4), "NAME1" NVARCHAR(30))')
    hana.commit()
    catalog.comments_by_name(pool, schema, ["MANDT"])
    for where in (None, "MANDT = '100'"):
        labels.value_texts(pool, schema, "MTART", ["A", "B"], where=where)
    labels.value_texts(pool, schema, "WERKS", ["A"])
    introspection.candidates(pool, schema)
    with pytest.MonkeyPatch.context() as patched:  # as in a schema of many tables
        patched.setattr(introspection, "_SMALL", 0)
        introspection.candidates(pool, schema)


def job_records(pool: HanaPool, schema: str, sent: list[str]) -> None:
    """Of several services."""
    times = LeaseTimes(renew=0.05)
    with closing(Journal(StoreRecords(lambda: pool, lambda: schema, times))) as journal:
        journal.register("a", "every minute")
        journal.register("a", "every hour")
        for _ in range(2):
            job = journal.add("a", turn=journal.turn("a"))
            assert job is not None
            journal.cancel(job.id)
        job = journal.add("a")
        assert job is not None
        assert journal.claim(["a"]) is not None
        deadline = time.monotonic() + 60
        while not any(sql.endswith('WHERE "ID" = ? AND "OWNER" = ?') for sql in sent):
            assert time.monotonic() < deadline, "the lease on a job is renewed"
            time.sleep(0.01)
        journal.wait(job.id, True)
        journal.progress(job.id, 1, 2)
        journal.cancel(job.id)
        assert journal.cancelling(job.id)
        journal.finish(job.id, "succeeded", result={})
        for collection in (None, "a"):
            journal.all(collection)
            journal.all(collection, "queued")
        journal.last("a")
        journal.events(job.id)
        journal.tally()
        journal.register("a", None)


def by_words(pool: HanaPool, store: HanaStore, schema: str, name: str) -> None:
    """One word, a number, several words, with a filter of either form; and where HANA refuses text search."""
    for text in ("text", "text 0003", "text other"):
        store.view(name).keyword(text, 3)
    for condition in ({"A": "1"}, {"A": {"$contains": "1"}}):
        store.view(name).keyword("text", 3, condition)
    store.view(name, row_filter=WITHIN).keyword("text", 3, {"B": 1})
    store.view(name).vectors(store.view(name).keyword("text", 3))
    without = HanaStore(RefusesTextSearch(pool), schema)  # type: ignore[arg-type]
    for text in ("text", "text other"):
        without.view(name).keyword(text, 3)


def read(store: HanaStore, name: str) -> None:
    """By ids of both kinds, and a sample; of all rows, and of those that somebody may see."""
    for within in (None, WITHIN):
        assert store.view(name, row_filter=within).texts(['["0",2]', "record:1"])
        for texts in (True, False):
            assert store.view(name, row_filter=within).sample(3, texts=texts).rows
    by_number, by_text = Order("B", numeric=True, descending=True), Order("A")
    for order, after, where in (
        (Order(), None, None),
        (Order(), Place('["0",2]'), None),
        (by_text, None, None),
        (by_text, Place('["0",2]', "0"), None),
        (by_text, Place('["0",2]'), None),
        (by_number, None, None),
        (by_number, Place('["0",2]', 2.0), None),
        (by_text, None, {"A": {"$contains": "1"}}),
    ):
        store.view(name).places(3, order, after, where)
    assert store.view(name, row_filter=WITHIN).places(3, by_number)
    for number in ("AB12", "1234"):
        store.view(name).keyed(number, 3)
        store.view(name).keyed(number, 3, {"A": {"$contains": "1"}})


class RefusesTextSearch:
    """A pool whose HANA says what one without text search on a column would."""

    def __init__(self, pool: HanaPool) -> None:
        self._pool = pool

    def read(self, sql: str, parameters: Sequence[Any] = (), doing: str = "") -> Any:
        if "SCORE(" in sql:
            raise StatementFailed("feature not supported", code=7)
        return self._pool.read(sql, parameters, doing=doing)


def changed_settings(pool: HanaPool, schema: str) -> None:
    """Other metadata names for a collection, and another model for one that is still empty."""
    first, second = (EngineEmbedder(load_engine(EngineOptions(model=model))) for model in ("hash:16", "hash:32"))
    HanaStore(pool, schema).open("empty", first)
    HanaStore(pool, schema, names={"empty": {"/BIC/X": "BIC_X"}}).open("empty", first)
    HanaStore(pool, schema).open("empty", second)


def generations(pool: HanaPool, hana: Any, schema: str) -> None:
    """All that can happen to them."""
    spec = CollectionSpec("beside", TableRef(schema, "SRC"), "{TXT}")
    recipe = Recipe(spec, ModelSource("hash:32"))
    first, second = (EngineEmbedder(load_engine(EngineOptions(model=model))) for model in ("hash:16", "hash:32"))
    store = HanaStore(pool, schema)
    store.open("beside", first)
    for _ in range(2):
        store.generations.begin("beside", second, recipe)
        store.generations.switch("beside", 2)
        store.generations.switch("beside", 1)
    store.generations.record("beside", 1, Recipe(spec, ModelSource("hash:64")))
    store.generations.drop("beside", 2)


def hanas_own_models(pool: HanaPool, hana: Any, schema: str) -> None:
    """A model of HANA, and one behind a remote source."""
    for name, model in (("native", NEB), ("remote", DatabaseModel("text-embedding-3-small", "AI_CORE"))):
        spec = CollectionSpec(name, TableRef(schema, "SRC"), "{TXT}")
        with closing(embedder_of(pool, model)) as embedder:
            ends, options = Ends(HanaSource(pool), HanaStore(pool, schema), embedder), SyncOptions(max_deletes=1.0)
            sync(spec, ends, options)
            hana.cursor().execute(f"""INSERT INTO "OWL_{name.upper()}_G1" ("SRC_KEY") VALUES ('["gone",1]')""")
            hana.commit()
            assert sync(spec, ends, options).deleted == 1
            with ends.store.lease(name, "test", 5) as lease:  # a row that passes through this process
                ends.store.apply(lease, ChangeSet(quarantined=[QuarantinedRow('["0",8]', "embed", "for the test")]))
            hana.cursor().execute("""UPDATE "SRC" SET "TXT" = ' ' WHERE "B" = 7""")
            hana.cursor().execute(f"""UPDATE "SRC" SET "TXT" = '{name}' WHERE "B" = 6""")
            other = f"""HEXTOBIN(LEFT(BINTOHEX("CONTENT_HASH"), 16)||'{"0" * 48}')"""  # of metadata
            hana.cursor().execute(
                f"""UPDATE "OWL_{name.upper()}_G1" SET "CONTENT_HASH" = {other} WHERE "CHUNK_NO" = 0"""
            )
            hana.commit()
            sync(spec, ends, replace(options, page_rows=5))
            hana.cursor().execute("""UPDATE "SRC" SET "TXT" = 'text 7' WHERE "B" = 7""")
            hana.commit()
            sync(replace(spec, changes=ChangeSpec(hash="server")), ends, options)  # all rows do
            assert verify(spec, ends).ok
            for texts in (["text 3"], ["text 4", "text 5"]):
                embedder.embed_queries(texts)
                embedder.embed_documents(texts)


def half_precision(pool: HanaPool, schema: str, embedder: EngineEmbedder) -> None:
    """Vectors of an engine, of HANA's models, and a search."""
    store = HanaStore(pool, schema, index_from=5, vector_type="half")
    remote = DatabaseModel("text-embedding-3-small", "AI_CORE")
    for name, each in (("halved", embedder), ("halfn", embedder_of(pool)), ("halfr", embedder_of(pool, remote))):
        spec = CollectionSpec(name, TableRef(schema, "SRC"), "{TXT}")
        ends = Ends(HanaSource(pool), store, each)
        sync(replace(spec, changes=ChangeSpec(hash="server")), ends, SyncOptions(max_deletes=1.0))
        with store.lease(name, "test", 5) as lease:
            store.apply(lease, ChangeSet(deleted=['["0",2]']))
        sync(spec, ends, SyncOptions(max_deletes=1.0))  # HANA's models embed this row inside HANA
        assert verify(spec, ends).ok
    store.view("halved").search(embedder.embed_query("text 3"), 3)


def views_and_wrong_names(pool: HanaPool, hana: Any, schema: str) -> None:
    hana.cursor().execute(
        'CREATE VIEW "NULLS" AS SELECT CASE WHEN "B" > 5 THEN "A" ELSE NULL END AS "A", "B", "TXT" FROM "SRC"'
    )
    hana.commit()
    source = HanaSource(pool)
    source.describe(TableRef(schema, "NULLS"))
    query = Query(TableRef(schema, "NULLS"), ("A", "B"), ("TXT",))
    list(source.pages(query, 3))
    for within in source.ranges(query, 3, 20):
        list(source.pages(query, 3, within))
    source.rows(query, [(None, 3)])
    for table in (TableRef(schema, "SRK"), TableRef("NO_SUCH_SCHEMA", "SRC")):
        with pytest.raises(ConnectorError):
            source.describe(table)


def insert(hana, rows) -> None:
    hana.cursor().executemany('INSERT INTO "SRC" VALUES (?,?,?,?,?)', rows)
    hana.commit()


def test_every_statement_sent_is_listed_and_every_listed_one_is_sent(recorded, shared_schema):
    sent = {each for sql in recorded for each in shapes(sql, shared_schema)}
    assert sent - listed() == set(), "sent, but not in docs/hana-sql.md"
    assert listed() - sent == set(), "in docs/hana-sql.md, but not sent any more"


def test_every_listed_statement_names_its_source():
    blocks = re.split(r"^```sql\n.*?\n```$", LIST.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)[:-1]
    known = re.compile(r"SQL Reference|langchain-hana|hana-ml|Qlik|as above|as the statement")
    assert all(known.search(text) for text in blocks)


def test_values_are_bound_never_written_into_the_text(recorded):
    for sql in recorded:
        assert "2026" not in sql
        assert "word" not in sql
        assert "[0." not in sql

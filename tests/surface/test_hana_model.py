"""A service whose models HANA computes: searches, checks, generations in both directions, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from app.src.access.principal import OPERATOR
from app.src.observe import checks
from app.src.service.search import Like
from app.src.service.service import Service
from app.src.settings import Settings
from connector.errors import ConfigurationError, Overloaded
from hana_emulator.testing import Emulator, running
from tests.surface.conftest import Cli
from tests.surface.test_torch_free import RUN_ALL, without_torch

NEB, GXY = "hana:SAP_NEB.20240715", "hana:SAP_GXY.20250407"
ROWS = [
    (1, "steel pump for hot water"),
    (2, "rubber seal for the pump shaft"),
    (3, "oil filter of a gear"),
    *((key, f"spare part {key} of machine {key % 7}") for key in range(4, 40)),
]
Make = Callable[..., Service]


def table(emulator: Emulator, schema: str) -> None:
    with closing(emulator.connect(autocommit=True, currentSchema=schema)) as connection:
        cursor = connection.cursor()
        cursor.execute('CREATE TABLE "T" ("K" INTEGER PRIMARY KEY, "X" NVARCHAR(50))')
        cursor.executemany('INSERT INTO "T" VALUES (?, ?)', ROWS)


def settings_of(emulator: Emulator, schema: str, model: str, own: dict[str, Any] | None = None) -> dict[str, Any]:
    login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")} | {"encrypt": False}
    block = {"name": "parts", "source": f"{schema}.T", "template": "{X}"} | (own or {})
    return {
        "hana": login,
        "store": {"kind": "hana", "schema": schema},
        "embedding": {"model": model},
        "collections": [block],
    }


@pytest.fixture
def make(emulator: Emulator, hana_schema: str) -> Iterator[Make]:
    """`make(model, own)`: a service over the table T; `own`: settings of the collection."""
    table(emulator, hana_schema)
    made: list[Service] = []

    def service(model: str = NEB, own: dict[str, Any] | None = None, schema: str = hana_schema) -> Service:
        made.append(Service(Settings.model_validate(settings_of(emulator, schema, model, own))))
        return made[-1]

    yield service
    for each in made:
        each.close()


def test_a_collection_is_planned_synced_searched_and_verified(make: Make) -> None:
    service = make()
    assert service.sync.plan("parts").calls == len(ROWS)
    report = service.sync.run("parts")
    assert (report.upserted, report.embedded_texts, report.quarantined) == (len(ROWS), len(ROWS), 0)
    assert service.sync.run("parts").unchanged == len(ROWS)
    assert service.sync.verify("parts").ok
    found = service.search.run("parts", "rubber seal", 3, principal=OPERATOR)
    assert (found.hits[0].key, found.notes) == ({"K": 2}, [])
    assert (found.hits[0].relevance or 0) > 0.2 > (found.hits[2].relevance or 0)
    (similar, *_) = service.search.run("parts", Like(found.hits[0].id), 1, principal=OPERATOR).hits
    assert similar.key == {"K": 1}
    (status,) = service.status.collections()
    assert status["model"].startswith(f"{NEB}@")
    assert (status["dimension"], status["rows"], status["model_languages"]) == (
        768,
        len(ROWS),
        ["de", "en", "es", "fr", "pt"],
    )
    info = service.status.info()
    assert (info["model"], info["dimension"], info["max_tokens"]) == (NEB, 768, 254)
    assert info["device"]["name"] == "SAP HANA"
    assert (info["device"]["path"], [each["name"] for each in info["settings"]]) == ("hana", ["precision", "path"])


def test_a_setting_makes_rows_leave(emulator: Emulator, hana_schema: str) -> None:
    table(emulator, hana_schema)
    settings = settings_of(emulator, hana_schema, NEB) | {"sync": {"rows_stay": False}}
    with closing(Service(Settings.model_validate(settings))) as service:
        said = "the rows leave HANA: the setting sync.rows_stay is false"
        assert said in service.sync.plan("parts").notes
        report = service.sync.run("parts")
    assert (report.loaded, said in report.notes) == (len(ROWS), True)


def test_a_repeated_query_and_a_probe_ask_hana_nothing(make: Make) -> None:
    service = make()
    service.sync.run("parts")
    engine = service.parts.engine
    for _ in range(2):
        service.search.run("parts", "rubber seal", 1, principal=OPERATOR)
    asked = engine.stats().texts
    service.search.run("parts", "rubber seal", 1, principal=OPERATOR)
    assert service.readiness.check().ready
    assert engine.stats().texts == asked


def test_texts_are_embedded_for_callers(make: Make) -> None:
    embedder = make().parts.embedder
    one, other = embedder.embed(["oil pump", "pump of oil"])
    query = embedder.embed(["oil pump"], input_type="query")[0]
    assert one @ query > 0.9
    assert 0.5 < one @ other < 1


def test_from_our_engine_to_hanas_and_back(make: Make) -> None:
    ours, theirs = make("hash:64"), make(NEB)
    ours.sync.run("parts")
    report = theirs.sync.run("parts")
    assert getattr(report, "generation", None) == 2
    compared = theirs.generations.compare("parts", 2)
    assert (compared.serving_rows, compared.other_rows) == (len(ROWS), len(ROWS))
    assert (compared.overlap_at_10 or 0) > 0.3
    assert (compared.same_first or 0) > 0.9
    assert theirs.sync.verify("parts", generation=2).ok
    theirs.generations.switch("parts")
    assert theirs.sync.run("parts").embedded_texts == 0
    for service in (theirs, ours):  # each finds the model of the active generation, whatever its settings name
        assert service.search.run("parts", "oil filter", 1, principal=OPERATOR).hits[0].key == {"K": 3}
        assert service.status.collections()[0]["dimension"] == 768
    assert (ours.sync.plan("parts").unchanged, ours.sync.plan("parts").new) == (len(ROWS), 0)
    back = ours.sync.run("parts")
    assert getattr(back, "generation", None) == 1, "the retired generation of the same model is filled again"
    assert ours.generations.compare("parts", 1).same_first == 1
    ours.generations.switch("parts")
    assert ours.sync.verify("parts").ok
    assert ours.search.run("parts", "oil filter", 1, principal=OPERATOR).hits[0].key == {"K": 3}


def test_a_generation_being_built_is_planned_as_a_full_comparison(make: Make) -> None:
    own = {"changes": {"method": "rowid"}}
    make("hash:64", own).sync.run("parts")
    service = make(NEB, own)
    assert service.sync.run("parts").method == service.sync.plan("parts").method == "full"
    service.generations.switch("parts")
    service.sync.run("parts")
    assert service.sync.plan("parts").method == "rowid"


def test_another_model_or_another_remote_source_is_another_generation(make: Make) -> None:
    assert make().sync.run("parts").upserted == len(ROWS)
    own: dict[str, Any] = {"model": "hana:text-embedding-3-small", "remote_source": "AI_CORE"}
    for number, changed in enumerate(({"model": GXY}, own, own | {"remote_source": "AI_CORE_2"}), 2):
        service = make(NEB, changed)
        assert getattr(service.sync.run("parts"), "generation", None) == number
        service.generations.switch("parts")
        assert service.search.run("parts", "oil filter", 1, principal=OPERATOR).hits[0].key == {"K": 3}
    other = make(NEB)
    assert other.search.run("parts", "oil filter", 1, principal=OPERATOR).hits[0].key == {"K": 3}


def test_doctor_asks_hana_for_the_model(make: Make) -> None:
    lines = {line["check"]: line for line in make().readiness.doctor()}
    assert all(line["ok"] for line in lines.values()), lines
    assert list(lines).index("model") > list(lines).index("hana login")
    assert f"{NEB}: 768 dimensions on SAP HANA" in lines["model"]["detail"]
    assert "de en es fr pt" in lines["model"]["detail"]


def test_doctor_says_that_a_remote_source_gets_the_texts(make: Make, emulator: Emulator, hana_schema: str) -> None:
    away = "SENDS TEXTS AWAY: texts of rows and searches go to HANA's remote source"
    model = {"model": "hana:text-embedding-3-small", "remote_source": "AI_CORE"}
    assert f"{away} AI_CORE" in make(NEB, model).readiness.probe_model()
    assert "AWAY" not in make().readiness.probe_model()
    settings = settings_of(emulator, hana_schema, NEB, model) | {"embedding": model | {"remote_source": "OTHER"}}
    with closing(Service(Settings.model_validate(settings))) as both:
        said = both.readiness.probe_model()
    assert f"{away} OTHER; collection parts: hana:text-embedding-3-small" in said
    assert f"{away} AI_CORE" in said


def test_a_hana_that_hangs_needs_no_new_process(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, ours = make(), make("hash:8")
    for service in (hanging, ours):
        monkeypatch.setattr(service.parts.embedder.engine, "stalled", lambda: 9999.0)
    assert hanging.readiness.beyond_help() is None
    assert "nothing comes of it" in (ours.readiness.beyond_help() or "")


def test_a_misspelled_model_leaves_the_active_one_at_work(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, wrong = make("hash:64"), make("hana:SAP_GXY.2025040")
    with pytest.raises(ConfigurationError, match=r"Did you mean 'SAP_GXY\.20250407'"):
        wrong.sync.verify("parts")
    ours.sync.run("parts")
    wrong.parts.warm()  # at the start of serve and worker
    assert "SAP_GXY.2025040" in caplog.text
    assert wrong.sync.verify("parts").ok
    assert wrong.search.run("parts", "oil filter", 1, principal=OPERATOR).hits[0].key == {"K": 3}
    with pytest.raises(ConfigurationError, match=r"Did you mean 'SAP_GXY\.20250407'"):
        wrong.sync.run("parts")
    for name, limit in (("MOST_FAILURES", 1), ("SICK_SECONDS", 0)):
        monkeypatch.setattr(checks, name, limit)
    assert wrong.readiness.check().checks == {"engine": False, "store": True}
    assert wrong.readiness.beyond_help() is None, "a new process would meet the same HANA"


def test_an_overloaded_hana_is_no_missing_model(make: Make) -> None:
    make().sync.run("parts")
    service = make()
    fault = {"match": "VECTOR_EMBEDDING", "action": "error", "code": 142, "text": "too many", "count": None}
    service.parts.store_pool.execute(f"ALTER SYSTEM INJECT FAULT '{json.dumps(fault)}'")
    try:
        with pytest.raises(Overloaded):
            service.search.run("parts", "oil filter", 1, principal=OPERATOR)
        service.parts.warm()  # at the start of serve and worker
        assert not service.readiness.check().ready
    finally:
        service.parts.store_pool.execute("ALTER SYSTEM CLEAR FAULTS")
    assert service.readiness.check().ready, "without a restart"
    assert service.search.run("parts", "oil filter", 1, principal=OPERATOR).hits[0].key == {"K": 3}


@pytest.mark.parametrize("code", ["258", "328"])
def test_doctor_and_sync_name_the_fix_where_hana_does_not_embed(code: str) -> None:
    with running("--without-nlp", code) as emulator:
        with closing(emulator.connect(autocommit=True)) as connection:
            connection.cursor().execute('CREATE SCHEMA "V"')
        table(emulator, "V")
        service = Service(Settings.model_validate(settings_of(emulator, "V", NEB)))
        with closing(service):
            lines = {line["check"]: line for line in service.readiness.doctor()}
            assert not lines["model"]["ok"]
            assert "Natural Language Processing" in lines["model"]["detail"]
            assert all(word in lines["model"]["fix"] for word in ("[embedding] model", "remote_source", "NLP"))
            with pytest.raises(ConfigurationError, match=f"code {code}"):
                service.sync.run("parts")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"store": {"kind": "local", "path": "x"}}, 'store.kind = "hana"'),
        ({"embedding": {"model": "hana:"}}, "names no model"),
        ({"scale": {"engine": "ray"}}, 'scale.engine = "off"'),
        ({"embedding": {"model": NEB, "query_prompt": "query: "}}, "query_prompt cannot be set"),
        ({"embedding": {"model": NEB, "revision": "r"}}, "revision cannot be set"),
        ({"embedding": {"model": "hash:16", "remote_source": "R"}}, "remote_source belongs to"),
        (
            {
                "store": {"kind": "local", "path": "x"},
                "embedding": {"model": "hash:16"},
                "collections": [{"name": "a", "source": "S.T", "template": "{X}", "model": NEB}],
            },
            r"\[\[collections\]\] a: ",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings.model_validate({"embedding": {"model": NEB}} | more)


@pytest.mark.parametrize("verb", ["finetune a", "calibrate a", "benchmark embed", "benchmark sync", "benchmark serve"])
def test_verbs_for_models_that_run_here_are_refused(here: Cli, tmp_path: Path, verb: str) -> None:
    (tmp_path / "owl-sap.toml").write_text(
        f"[embedding]\nmodel = '{NEB}'\n[[collections]]\nname = 'a'\nsource = 'S.T'\ntemplate = '{{X}}'\n"
    )
    run = here(*verb.split())
    assert (run.code, run.out) == (2, "")
    assert f'HANA computes "{NEB}"' in run.err


def test_everything_runs_without_torch(tmp_path: Path, emulator: Emulator, hana_schema: str) -> None:
    table(emulator, hana_schema)
    (tmp_path / "owl-sap.toml").write_text(
        f"[[collections]]\nname = 'c'\nsource = '{hana_schema}.T'\ntemplate = '{{X}}'\n", encoding="utf-8"
    )
    login = {"HOST": emulator.host, "PORT": str(emulator.port), "USER": emulator.user, "PASSWORD": emulator.password}
    more = {f"HANA_{name}": value for name, value in login.items()}
    more |= {"HANA_ENCRYPT": "false", "HANA_SCHEMA": hana_schema, "OWL_SAP_STORE__KIND": "hana"}
    (tmp_path / "texts").write_text("steel\n")
    verbs = (["sync", "c"], ["verify", "c"], ["search", "c", "rubber seal", "-k", "1"], ["embed", "texts"], ["doctor"])
    texts = json.dumps([[*verb, "--json"] for verb in verbs])
    run = without_torch(tmp_path, "-c", RUN_ALL, stdin=texts, model=NEB, more=more)
    assert run.returncode == 0, run.stderr
    synced, verified, found, embedded, checked = json.loads(run.stdout)
    assert [each[0] for each in (synced, verified, found, embedded, checked)] == [0] * 5, run.stdout
    assert json.loads(found[1])[0]["key"] == {"K": 2}
    assert [len(vector) for vector in json.loads(embedded[1])] == [768]

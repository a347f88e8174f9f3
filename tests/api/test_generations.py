"""Another model or template beside what serves: in the service, with the test embedder in two sizes, and over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from httpx import Client

from app.src.access.principal import OPERATOR
from app.src.core.backends import DeviceFailed
from app.src.core.backends.folder import find_folder
from app.src.service.search import MODES, SearchOptions
from app.src.service.service import Service
from app.src.service.sync import BuildReport
from app.src.settings import Settings
from connector.errors import ConfigurationError, ConnectionLost, GenerationRefused, ModelMismatch, UnknownGeneration
from connector.model import ModelSource, Recipe
from connector.stores.records import recipe_of, recipe_text
from tests.api.conftest import TableSource, serving
from tests.api.test_routes import finished, problem
from tests.core.conftest import make_tiny_folder, write

PLACE = "/v1/collections/materials/generations"
NAME = "materials"
Configured = Callable[..., Service]


@pytest.fixture
def configured(settings: Settings, source: TableSource) -> Iterator[Configured]:
    """A service over the same store by other settings: `configured(model=..., template=..., switch=...)`."""
    made: list[Service] = []

    def make(model: str = "hash:64", **block: Any) -> Service:
        embedding = settings.embedding.model_copy(update={"model": model})
        collections = tuple(each.model_copy(update=block) for each in settings.collections)
        changed = settings.model_copy(update={"embedding": embedding, "collections": collections})
        made.append(Service(changed, source=source))
        return made[-1]

    yield make
    source.gate.set()
    for service in made:
        service.close()


@pytest.fixture
def wide(synced: Service, configured: Configured) -> Service:
    """Settings with another model than that of the four rows that are stored."""
    return configured("hash:128")


def states(service: Service, name: str = NAME) -> dict[int, str]:
    return {each["generation"]: each["state"] for each in service.generations.shown(name)}


def rows(service: Service) -> dict[int, int]:
    return {each["generation"]: each["rows"] for each in service.generations.shown(NAME)}


def add(source: TableSource, key: str, text: str) -> None:
    source.rows_by_key[key] = {"MATNR": key, "MAKTX": text, "MTART": "ROH"}


def first(service: Service, text: str) -> str:
    return str(service.search.run(NAME, text, 1, principal=OPERATOR).hits[0].key["MATNR"])


# ------------------------------------------------------------------------------------------------------ another model


def test_sync_builds_beside_what_serves_and_keeps_that_up(wide: Service, source: TableSource) -> None:
    add(source, "5", "copper wire")
    report = wide.sync.run(NAME)
    assert isinstance(report, BuildReport)
    assert (report.collection, report.generation, report.upserted, report.unchanged) == (NAME, 2, 5, 0)
    assert report.serving is not None
    assert (report.serving.upserted, report.serving.unchanged, report.serving.embedded_texts) == (1, 4, 1)
    document = report.as_dict()
    assert (document["generation"], document["serving"]["upserted"]) == (2, 1)  # type: ignore[index]
    assert any("--switch" in note for note in report.notes)
    metrics = wide.metrics.render().decode()
    assert "owl_sap_embed_texts_total 6.0" in metrics
    assert 'rows_synced_total{collection="materials",outcome="upserted"} 5.0' in metrics
    assert states(wide) == {1: "active", 2: "building"}
    assert rows(wide) == {1: 5, 2: 5}
    (status,) = wide.status.collections([NAME])
    assert (status["generation"], status["dimension"]) == (1, 64)


def test_a_second_sync_embeds_nothing_again(wide: Service, source: TableSource) -> None:
    wide.sync.run(NAME)
    add(source, "5", "copper wire")
    report = wide.sync.run(NAME)
    assert isinstance(report, BuildReport)
    assert (report.generation, report.upserted, report.unchanged, report.embedded_texts) == (2, 1, 4, 1)
    assert report.serving is not None
    assert report.serving.embedded_texts == 1


def test_queries_are_embedded_by_the_model_that_serves(wide: Service) -> None:
    for mode in MODES:
        found = wide.search.run(NAME, "office chair", 1, options=SearchOptions(mode=mode), principal=OPERATOR)
        assert found.hits[0].key == {"MATNR": "4"}
    wide.sync.run(NAME)
    assert first(wide, "office chair") == "4"
    assert wide.search.run(NAME, [1.0] * 64, 1, principal=OPERATOR).hits
    wide.generations.switch(NAME)
    assert first(wide, "office chair") == "4"
    assert wide.search.run(NAME, [1.0] * 128, 1, principal=OPERATOR).hits
    with pytest.raises(ValueError, match="128"):
        wide.search.run(NAME, [1.0] * 64, 1, principal=OPERATOR)


def test_a_service_that_knows_nothing_of_the_switch_goes_along(
    wide: Service, synced: Service, configured: Configured, source: TableSource
) -> None:
    """`synced` has just searched, so it remembers the first generation and its model."""
    wide.sync.run(NAME)
    reader = configured("hash:128")
    for service in (synced, reader):
        assert first(service, "garden hose") == "2"
    add(source, "5", "copper wire")
    wide.sync.run(NAME)
    wide.generations.switch(NAME)
    wide.generations.drop(NAME, 1)
    for service in (synced, reader):
        assert first(service, "copper wire") == "5"
        assert service.status.collections([NAME])[0]["generation"] == 2


def test_the_switch_and_back(wide: Service, configured: Configured, source: TableSource) -> None:
    wide.sync.run(NAME)
    switched = wide.generations.switch(NAME)
    assert (switched.generation, switched.retired, switched.notes) == (2, 1, [])
    assert states(wide) == {1: "retired", 2: "active"}
    with pytest.raises(GenerationRefused, match="is being built"):
        wide.generations.switch(NAME)
    with pytest.raises(GenerationRefused, match="already active"):
        wide.generations.switch(NAME, 2)
    plain = wide.sync.run(NAME)
    assert not isinstance(plain, BuildReport)
    assert (plain.unchanged, plain.embedded_texts) == (4, 0)
    back = wide.generations.rollback(NAME)
    assert (back.generation, back.retired) == (1, 2)
    assert "the next sync builds" in back.notes[0]
    assert states(wide) == {1: "active", 2: "retired"}
    add(source, "5", "copper wire")
    before = configured("hash:64").sync.run(NAME)
    assert (before.upserted, before.unchanged) == (1, 4)
    again = wide.sync.run(NAME)
    assert isinstance(again, BuildReport)
    assert (again.generation, again.embedded_texts) == (2, 1), "what was embedded once is built on"


def test_nothing_to_go_back_to(synced: Service) -> None:
    with pytest.raises(GenerationRefused, match="roll back"):
        synced.generations.rollback(NAME)
    with pytest.raises(GenerationRefused, match="is being built"):
        synced.generations.switch(NAME)
    with pytest.raises(UnknownGeneration, match="there are: 1"):
        synced.generations.switch(NAME, 4)
    with pytest.raises(UnknownGeneration, match="never synced"):
        synced.generations.switch("never", 1)
    assert synced.generations.shown("never") == []


def test_one_that_is_not_complete_is_not_switched_to(wide: Service) -> None:
    wide.parts.store.generations.begin(
        NAME, wide.parts.embedder, Recipe(wide.collections.spec(NAME), wide.parts.embedder.source)
    )
    with pytest.raises(GenerationRefused, match=r"not complete.*--force"):
        wide.generations.switch(NAME)
    assert states(wide) == {1: "active", 2: "building"}
    wide.generations.switch(NAME, force=True)
    assert states(wide) == {1: "retired", 2: "active"}
    assert wide.sync.run(NAME).upserted == 4


def test_a_build_that_was_stopped_goes_on(wide: Service, source: TableSource) -> None:
    pages: list[int] = []

    def stop() -> bool:
        pages.append(1)
        return len(pages) == 4 + 2  # four pages of what serves, two of the other

    report = wide.sync.run(NAME, stop=stop)
    assert isinstance(report, BuildReport)
    assert report.stopped
    assert any("not complete" in note for note in report.notes)
    assert [each["complete"] for each in wide.generations.shown(NAME)] == [True, False]
    again = wide.sync.run(NAME)
    assert isinstance(again, BuildReport)
    assert (again.generation, again.unchanged + again.upserted) == (2, 4)
    assert again.embedded_texts == again.upserted == 4 - report.upserted
    assert report.upserted > 0


def test_verify_proves_each_by_its_own_model(wide: Service, source: TableSource) -> None:
    wide.sync.run(NAME)
    assert wide.sync.verify(NAME).ok
    assert wide.sync.verify(NAME, generation=2).ok
    add(source, "5", "copper wire")
    for number in (None, 2):
        assert wide.sync.verify(NAME, generation=number).missing == 1
        assert wide.sync.verify(NAME, repair=True, generation=number).ok
    assert rows(wide) == {1: 5, 2: 5}
    with pytest.raises(UnknownGeneration):
        wide.sync.verify(NAME, generation=3)


def test_rows_set_aside_are_retried_in_what_serves(wide: Service, source: TableSource) -> None:
    source.rows_by_key["2"]["MTART"] = "x" * 200_000
    wide.sync.run(NAME)
    assert len(wide.quarantine.entries(NAME)) == 1
    source.rows_by_key["2"]["MTART"] = "ROH"
    assert wide.quarantine.retry(NAME).upserted == 1
    assert rows(wide) == {1: 4, 2: 3}


def test_plan_is_about_what_a_sync_would_build(wide: Service, source: TableSource) -> None:
    plan = wide.sync.plan(NAME, estimate=False)
    assert any("builds a generation" in note for note in plan.notes)
    assert (plan.collection, plan.new, plan.unchanged) == (NAME, 4, 0)
    wide.sync.run(NAME)
    add(source, "5", "copper wire")
    plan = wide.sync.plan(NAME, estimate=False)
    assert (plan.collection, plan.new, plan.unchanged) == (NAME, 1, 4)


def test_rows_are_shown_by_the_key_they_were_stored_by(synced: Service, configured: Configured) -> None:
    other = configured(key=("MAKTX",))
    hits = other.search.run(NAME, "office chair", 1, principal=OPERATOR).hits
    assert [hit.key for hit in hits] == [{"MATNR": "4"}]
    assert other.sync.run(NAME).paused == "schema_changed"
    assert other.status.collections([NAME])[0]["key"] == ("MATNR",)
    built = other.sync.build(NAME)
    assert isinstance(built, BuildReport)
    assert built.serving is not None
    assert (built.serving.paused, built.serving.unchanged) == (None, 4), "kept up by the key that it was made by"


def test_an_empty_collection_takes_the_model_at_once(service: Service, configured: Configured) -> None:
    service.parts.store.open(NAME, service.parts.embedder)
    report = configured("hash:128").sync.run(NAME)
    assert not isinstance(report, BuildReport)
    assert (report.upserted, service.status.collections([NAME])[0]["dimension"]) == (4, 128)


def test_a_model_that_is_gone_does_not_hold_up_its_successor(
    wide: Service, synced: Service, configured: Configured, source: TableSource
) -> None:
    gone = Recipe(synced.collections.spec(NAME), ModelSource("/no/such/model"))
    synced.parts.store.generations.record(NAME, 1, gone)
    with pytest.raises(ModelMismatch, match=r"generation 1 .*hash:64.*mode keyword.*owl-sap sync"):
        wide.search.run(NAME, "steel", principal=OPERATOR)
    assert configured("hash:64").search.run(NAME, "steel", 1, principal=OPERATOR).hits, (
        "the configured one will do, whatever was recorded"
    )
    add(source, "5", "copper wire")
    report = wide.sync.run(NAME)
    assert isinstance(report, BuildReport)
    assert (report.serving, report.upserted) == (None, 5)
    assert any("was not updated" in note and "/no/such/model" in note for note in report.notes)
    wide.generations.switch(NAME)
    assert first(wide, "copper wire") == "5"


def test_one_of_an_earlier_version_is_found_by_the_name_of_its_model(service: Service, configured: Configured) -> None:
    from connector.sync.run import Ends, sync

    sync(service.collections.spec(NAME), Ends(service.parts.source, service.parts.store, service.parts.embedder))
    assert service.generations.shown(NAME)[0]["template"] is None
    wide = configured("hash:128")
    assert first(wide, "office chair") == "4"
    report = wide.sync.run(NAME)
    assert isinstance(report, BuildReport)
    assert report.serving is not None
    assert report.serving.unchanged == 4
    assert [each["template"] for each in wide.generations.shown(NAME)] == ["{MAKTX}"] * 2


def test_a_source_that_is_away_is_an_error_of_both(wide: Service, source: TableSource) -> None:
    source.failure = ConnectionLost("gone")
    with pytest.raises(ConnectionLost):
        wide.sync.run(NAME)
    assert first(wide, "office chair") == "4"


def test_a_third_model_is_told_of_the_unfinished_second(wide: Service, configured: Configured) -> None:
    wide.sync.run(NAME)
    third = configured("hash:32")
    report = third.sync.run(NAME)
    assert isinstance(report, BuildReport)
    assert report.generation == 3
    assert any("generation 2 was not switched to" in note and "--drop 2" in note for note in report.notes)
    back = configured("hash:64").sync.run(NAME)
    assert not isinstance(back, BuildReport)
    assert any("generation 2, 3" in note for note in back.notes)


# --------------------------------------------------------------------------------------------------- another template


def test_a_template_is_healed_in_place_unless_it_is_built(synced: Service, configured: Configured) -> None:
    assert configured(template="{MAKTX} ({MTART})").sync.run(NAME).upserted == 4
    other = configured(template="{MTART}: {MAKTX}")
    report = other.sync.build(NAME)
    assert isinstance(report, BuildReport)
    assert (report.generation, report.upserted) == (2, 4)
    assert report.serving is not None
    assert report.serving.unchanged == 4, "by its own template"
    texts = [each["template"] for each in other.generations.shown(NAME)]
    assert texts == ["{MAKTX} ({MTART})", "{MTART}: {MAKTX}"]
    assert (
        other.search.run(NAME, "office chair", 1, principal=OPERATOR).hits[0].text == "office chair with wheels (ROH)"
    )
    assert other.sync.verify(NAME).ok, "what serves is proved by its own template"
    again = other.sync.run(NAME)
    assert isinstance(again, BuildReport)
    assert (again.generation, again.unchanged) == (2, 4)
    other.generations.switch(NAME)
    assert other.search.run(NAME, "office chair", 1, principal=OPERATOR).hits[0].text == "ROH: office chair with wheels"
    assert not isinstance(other.sync.run(NAME), BuildReport)
    assert other.generations.rollback(NAME).generation == 1
    assert (
        other.search.run(NAME, "office chair", 1, principal=OPERATOR).hits[0].text == "office chair with wheels (ROH)"
    )


def test_a_repair_records_by_which_template_the_rows_are_now(synced: Service, configured: Configured) -> None:
    other = configured(template="{MAKTX} of {MTART}")
    assert not other.sync.verify(NAME).ok
    assert synced.sync.verify(NAME).ok, "only a repair changes rows"
    assert other.sync.verify(NAME, repair=True).repaired == 4
    report = configured("hash:128", template="{MAKTX} of {MTART}").sync.run(NAME)
    assert isinstance(report, BuildReport)
    assert report.serving is not None
    assert (report.serving.unchanged, report.serving.upserted) == (4, 0)


def test_a_build_goes_on_with_what_the_settings_say_meanwhile(synced: Service, configured: Configured) -> None:
    configured(template="{MTART}: {MAKTX}").sync.build(NAME)
    report = configured(template="{MTART} - {MAKTX}").sync.run(NAME)
    assert isinstance(report, BuildReport)
    assert (report.generation, report.upserted) == (2, 4)
    assert [each["template"] for each in synced.generations.shown(NAME)] == ["{MAKTX}", "{MTART} - {MAKTX}"]


def test_what_was_never_synced_is_not_built_beside(service: Service) -> None:
    with pytest.raises(ConfigurationError, match="no collection"):
        service.sync.build(NAME)


# ---------------------------------------------------------------------------------------------------------- comparing


def test_two_are_compared_by_stored_texts_and_by_given_ones(wide: Service, source: TableSource) -> None:
    add(source, "5", "copper wire")
    wide.sync.run(NAME)
    compared = wide.generations.compare(NAME, queries=["pump", "chair"])
    assert (compared.serving, compared.other, compared.complete) == (1, 2, True)
    assert (compared.serving_rows, compared.other_rows, compared.queries) == (5, 5, 7)
    assert compared.overlap_at_10 == 1.0, "there are only five rows"
    assert compared.same_first is not None
    assert compared.same_first >= 5 / 7, "each stored text finds itself"
    assert wide.generations.compare(NAME, 2, sample=2).queries == 2
    assert wide.generations.compare(NAME, sample=0).overlap_at_10 is None
    with pytest.raises(GenerationRefused, match="is active"):
        wide.generations.compare(NAME, 1)


def test_a_comparison_sees_rows_that_are_missing(wide: Service) -> None:
    wide.sync.run(NAME)
    with wide.parts.store.lease("materials@2", "test", 5) as lease:
        from connector.model import ChangeSet

        wide.parts.store.apply(lease, ChangeSet(deleted=['["1"]', '["2"]']))
    compared = wide.generations.compare(NAME)
    assert (compared.serving_rows, compared.other_rows, compared.overlap_at_10) == (4, 2, 0.5)


def test_switching_by_itself(synced: Service, configured: Configured, source: TableSource) -> None:
    auto = configured("hash:128", switch="auto")
    report = auto.sync.run(NAME)
    assert any("generation 2 is active now instead of 1" in note for note in report.notes), report.notes
    assert states(auto) == {1: "retired", 2: "active"}
    assert not isinstance(auto.sync.run(NAME), BuildReport)


def test_a_gpu_that_fails_before_the_switch_does_not_prevent_it(
    synced: Service, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends with its error, so that the job goes on after the restart, and does not succeed with a note."""

    def failing(*_: Any, **__: Any) -> Any:
        raise DeviceFailed("the card is gone")

    auto = configured("hash:128", switch="auto")
    with monkeypatch.context() as broken:
        broken.setattr(auto.generations, "compare", failing)
        with pytest.raises(DeviceFailed):
            auto.sync.run(NAME)
        assert states(auto) == {1: "active", 2: "building"}
        broken.setattr(auto.generations, "maker", failing)  # of the active one's recipe and model
        with pytest.raises(DeviceFailed):
            auto.sync.run(NAME)
    report = auto.sync.run(NAME)
    assert any("generation 2 is active now instead of 1" in note for note in report.notes), report.notes


def test_switching_by_itself_needs_something_to_compare_by(synced: Service, configured: Configured) -> None:
    synced.parts.store.generations.record(NAME, 1, Recipe(synced.collections.spec(NAME), ModelSource("/no/such/model")))
    auto = configured("hash:128", switch="auto")
    report = auto.sync.run(NAME)
    assert any("was not switched to" in note for note in report.notes), report.notes
    assert states(auto) == {1: "active", 2: "building"}


@pytest.mark.slow
def test_from_the_test_embedder_to_the_real_model_of_the_same_dimension(
    configured: Configured, source: TableSource
) -> None:
    """Both have 384 dimensions, so nothing but the generation keeps a query from the vectors of the other model."""
    old = configured("hash:384")
    old.sync.run(NAME)
    new = configured("all-MiniLM-L6-v2")
    meaning = "a seat for the desk"
    assert first(new, "office chair") == first(old, "office chair") == "4"
    report = new.sync.run(NAME)
    assert isinstance(report, BuildReport)
    assert (report.upserted, report.serving is not None and report.serving.unchanged) == (4, 4)
    compared = new.generations.compare(NAME, queries=[meaning])
    assert compared.overlap_at_10 == 1.0
    before = [hit.score for hit in old.search.run(NAME, meaning, 4, principal=OPERATOR).hits]
    assert [hit.score for hit in new.search.run(NAME, meaning, 4, principal=OPERATOR).hits] == before, (
        "by the model that serves"
    )
    new.generations.switch(NAME)
    assert first(new, meaning) == "4"
    after = [hit.score for hit in new.search.run(NAME, meaning, 4, principal=OPERATOR).hits]
    assert after != before
    assert [hit.score for hit in old.search.run(NAME, meaning, 4, principal=OPERATOR).hits] == after, (
        "the other process goes along"
    )
    assert new.sync.verify(NAME).ok
    assert new.sync.verify(NAME, generation=1).ok
    new.generations.rollback(NAME)
    assert [hit.score for hit in new.search.run(NAME, meaning, 4, principal=OPERATOR).hits] == before


# --------------------------------------------------------------------------------------------------------------- REST


@pytest.fixture
def client(wide: Service) -> Iterator[Client]:
    with serving(wide) as client:
        yield client


def act(client: Client, action: str, **more: Any) -> Any:
    response = client.post(PLACE, json={"action": action, **more})
    assert response.status_code == 200, response.text
    return response.json()


def test_over_http(client: Client) -> None:
    assert client.get("/v1/collections/never/generations").json() == []
    started = client.post(PLACE, json={"action": "build"})
    assert (started.status_code, started.headers["location"].startswith("/v1/jobs/")) == (202, True)
    job = finished(client, started.json()["job"])
    assert (job["kind"], job["state"], job["result"]["generation"]) == ("build", "succeeded", 2)
    assert job["result"]["serving"]["unchanged"] == 4
    old, new = client.get(PLACE).json()
    assert (old["state"], old["dimension"], old["rows"], old["template"]) == ("active", 64, 4, "{MAKTX}")
    assert (new["state"], new["dimension"], new["rows"], new["complete"]) == ("building", 128, 4, True)
    compared = act(client, "compare", queries=["pump"], sample=3)
    assert (compared["queries"], compared["overlap_at_10"]) == (4, 1.0)
    assert act(client, "switch") == {"collection": NAME, "generation": 2, "retired": 1, "notes": []}
    hits = client.post("/v1/collections/materials/search", json={"query": "office chair", "k": 1}).json()["hits"]
    assert hits[0]["key"] == {"MATNR": "4"}
    assert act(client, "rollback")["generation"] == 1
    assert client.get("/v1/collections/materials").json()["generation"] == 1
    dropped = act(client, "drop", number=2)
    assert dropped == {"collection": NAME, "dropped": 2}
    shapes = client.get("/openapi.json").json()["components"]["schemas"]
    assert set(shapes["GenerationDropped"]["properties"]) == set(dropped)
    assert [each["generation"] for each in client.get(PLACE).json()] == [1]
    syncing = client.post("/v1/collections/materials/sync").json()["job"]
    assert finished(client, syncing)["result"]["generation"] == 3


def test_another_generation_is_verified_over_http(client: Client, wide: Service) -> None:
    wide.sync.run(NAME)
    job = client.post("/v1/collections/materials/verify", json={"generation": 2}).json()["job"]
    result = finished(client, job)["result"]
    assert (result["ok"], result["rows"], result["collection"]) == (True, 4, "materials@2")


def test_listing_refuses(client: Client) -> None:
    problem(client.get("/v1/collections/nope/generations"), 404)
    problem(client.get("/v1/collections/materials@1/generations"), 404)


def test_changing_refuses(client: Client, wide: Service, source: TableSource) -> None:
    def refused(status: int, **body: Any) -> str:
        return str(problem(client.post(PLACE, json=body), status)["detail"])

    problem(client.post("/v1/collections/nope/generations", json={"action": "switch"}), 404)
    assert "there are: 1" in refused(404, action="switch", number=7)
    assert "being built" in refused(409, action="switch")
    assert "roll back" in refused(409, action="rollback")
    assert "cannot be dropped" in refused(409, action="drop", number=1)
    assert "is active" in refused(409, action="compare", number=1)
    refused(422, action="drop")
    refused(422, action="build", number=2)
    refused(422, action="swap")
    refused(422, action="compare", number=0)
    refused(422, action="compare", queries=["pump", 5])
    refused(413, action="compare", queries=["x"] * 9)
    source.gate.clear()
    client.post("/v1/collections/materials/sync")
    assert "under way" in refused(409, action="build")
    source.gate.set()


# ------------------------------------------------------------------------------------------------------- other prompts


def test_other_prompts_are_another_model(synced: Service, configured: Configured) -> None:
    prompted = configured(query_prompt="query: ", document_prompt="passage: ")
    report = prompted.sync.run(NAME)
    assert isinstance(report, BuildReport)
    assert first(prompted, "rubber seal") == first(synced, "rubber seal"), "the model of generation 1 is still there"
    assert prompted.generations.embedder_of(NAME).source.document_prompt is None
    assert prompted.generations.switch(NAME).notes == []
    assert prompted.sync.run(NAME).embedded_texts == 0
    plain = configured()
    serving = plain.generations.embedder_of(NAME)
    assert (serving.source.query_prompt, serving.source.document_prompt) == ("query: ", "passage: "), "as recorded"
    assert first(plain, "rubber seal") == first(synced, "rubber seal")
    plain.generations.rollback(NAME)
    (note,) = plain.generations.switch(NAME, 2).notes
    assert "other prompts: the next sync builds" in note


def test_a_recipe_recorded_before_there_were_prompts_is_read(synced: Service) -> None:
    recipe = Recipe(synced.collections.spec(NAME), ModelSource("hash:64", "r1", "00", "fp32"))
    recorded = json.loads(recipe_text(recipe))
    for name in ("query_prompt", "document_prompt"):
        del recorded["model"][name]
    found = recipe_of(NAME, json.dumps(recorded))
    assert found is not None
    assert found.model == recipe.model


def test_a_generation_with_prompts_of_which_no_record_was_kept_is_a_mismatch(
    synced: Service, configured: Configured
) -> None:
    prompted = configured(document_prompt="passage: ")
    prompted.sync.run(NAME)
    prompted.generations.switch(NAME)
    plain = configured()
    store, spec = plain.parts.store, plain.collections.spec(NAME)
    store.generations.record(NAME, 2, Recipe(spec, ModelSource("hash:64")))
    with pytest.raises(ModelMismatch, match=r"generation 2 .* gives other vectors.*owl-sap generations materials --sw"):
        plain.generations.embedder_of(NAME)


def test_a_generation_made_while_prompts_of_the_folder_were_ignored_serves_on(
    settings: Settings, source: TableSource, tmp_path: Path
) -> None:
    folder = make_tiny_folder(tmp_path, find_folder("all-MiniLM-L6-v2"))

    def service() -> Service:
        embedding = settings.embedding.model_copy(update={"model": str(folder), "device": "cpu"})
        return Service(settings.model_copy(update={"embedding": embedding}), source=source)

    with closing(service()) as before:
        before.sync.run(NAME)
    write(folder / "config_sentence_transformers.json", {"prompts": {"query": "query: ", "passage": "passage: "}})
    with closing(service()) as after:
        assert after.search.run(NAME, "rubber seal", 1, principal=OPERATOR).hits
        report = after.sync.run(NAME)
        assert isinstance(report, BuildReport)
        assert report.serving is not None

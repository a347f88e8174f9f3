"""API keys with claims, through the guard: what their bearers see, and what the audit log has of them and of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from app.src.access.keys import Grant, create
from app.src.service.service import Service
from app.src.settings import Settings, load
from tests.access.conftest import settings_with
from tests.api.conftest import TableSource, serving

SEARCH = "/v1/collections/materials/search"


def test_keys_see_the_rows_of_their_claims_and_all_is_told(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    made: dict[str, Any] = {
        "mine": Grant("mine", ("search", "sync"), {"owner": "FERT"}),
        "both": Grant("both", ("search",), {"owner": ["FERT", "ROH"]}),
        "none": Grant("none", ("search",)),
        "all": Grant("all", ("search",), every_row=True),
        "embeds": Grant("embeds", ("embed",), {"owner": "FERT"}),
    }
    keys = {name: create(file, grant) for name, grant in made.items()}
    block = {"name": "materials", "source": "S.MARA", "template": "{MAKTX}", "metadata": ["MTART"]}
    settings = Settings.model_validate(
        {
            "store": {"kind": "local", "path": tmp_path / "vectors"},
            "embedding": {"model": "hash:16"},
            "access": {"keys": file, "audit": str(tmp_path / "audit.log")},
            "collections": [block | {"row_rights": {"MTART": "owner"}}],
        }
    )
    service = Service(settings, source=TableSource())
    service.sync.run("materials")

    def seen(name: str) -> int | set[str]:
        answer = client.post(SEARCH, json={"query": "steel"}, headers={"X-API-Key": keys[name][1]})
        if answer.status_code != 200:
            return answer.status_code
        return {hit["metadata"]["MTART"] for hit in answer.json()["hits"]}

    with serving(service) as client:
        assert seen("mine") == {"FERT"}
        assert seen("both") == seen("all") == {"FERT", "ROH"}
        assert seen("none") == set()
        assert seen("embeds") == 403
        assert client.post(SEARCH, json={"query": "steel"}).status_code == 401
        mine = {"X-API-Key": keys["mine"][1]}
        assert client.get("/v1/collections/materials/quarantine", headers=mine).status_code == 403
        assert client.get("/health/live").status_code == 200
    service.close()
    lines = [json.loads(line) for line in (tmp_path / "audit.log").read_text(encoding="utf-8").splitlines()]
    assert [each["credential"] for each in lines] == ["key"] * 5 + ["none", "key"]
    told = [(each["principal"], each["status"], each["decision"], each["why"], each.get("rows")) for each in lines]
    ids = {name: key.id for name, (key, _) in keys.items()}
    assert told == [
        (ids["mine"], 200, "allowed", None, "some"),
        (ids["both"], 200, "allowed", None, "some"),
        (ids["all"], 200, "allowed", None, "all"),
        (ids["none"], 200, "allowed", None, "none"),
        (ids["embeds"], 403, "refused", "scope", None),
        ("anonymous", 401, "refused", "missing", None),
        (ids["mine"], 403, "refused", "row_rights", None),
    ]
    assert {each["collection"] for each in lines} == {"materials"}
    assert {each["route"] for each in lines[:6]} == {"/v1/collections/{name}/search"}


def test_strangers_cannot_have_as_much_written_as_they_like(tmp_path: Path) -> None:
    """Each refusal was a line: who has no key could fill the disk with the audit log."""
    file = tmp_path / "keys.json"
    _, key = create(file, Grant("web", ("search",)))
    audit = str(tmp_path / "audit.log")
    settings = settings_with(tmp_path, keys=file, audit=audit, failures="3/hour")
    service = Service(settings, source=TableSource())
    with serving(service) as client:
        answers = [client.post(SEARCH, json={"query": "steel"}).status_code for _ in range(20)]
        assert answers == [401] * 3 + [429] * 17
        assert client.get("/v1/info", headers={"X-API-Key": key}).status_code == 200
        refused = service.metrics.access_refused.labels("missing")._value.get()
    service.close()
    lines = [json.loads(line) for line in Path(audit).read_text(encoding="utf-8").splitlines()]
    assert [each["status"] for each in lines] == [401] * 3 + [429, 200]
    assert refused == 20, "they are counted all the same"


def test_who_may_create_a_collection(tmp_path: Path) -> None:
    """Its `where` is SQL, and without row rights it would show the rows of a collection that has some."""
    keys, file = tmp_path / "keys.json", tmp_path / "owl-sap.toml"
    made = {
        "syncs": Grant("syncs", ("embed", "search", "sync", "metrics")),
        "admin": Grant("admin", ("admin",), {"owner": "FERT"}),
        "all": Grant("all", ("admin",), every_row=True),
    }
    file.write_text(
        f'[store]\nkind = "local"\npath = "{tmp_path}/vectors"\n[embedding]\nmodel = "hash:16"\n'
        f'[access]\nkeys = "{keys}"\naudit = "{tmp_path}/audit.log"\n[[collections]]\n'
        f'name = "materials"\nsource = "S.MARA"\ntemplate = "{{MAKTX}}"\n'
        'metadata = ["MTART"]\nrow_rights = {MTART = "owner"}\n',
        encoding="utf-8",
    )
    secrets = {name: create(keys, grant)[1] for name, grant in made.items()}
    before = file.read_bytes()
    block = {"name": "parts", "source": "S.MARA", "template": "{MAKTX}", "where": "MTART = 'SECRET-4711'"}
    service = Service(load(file).settings, source=TableSource(), file=file)

    def created_by(name: str) -> int:
        return client.post("/v1/collections", json=block, headers={"X-API-Key": secrets[name]}).status_code

    with serving(service) as client:
        assert client.post("/v1/collections", json=block).status_code == 401
        assert [created_by("syncs"), created_by("admin")] == [403, 403]
        assert file.read_bytes() == before
        assert created_by("all") == 201
    service.close()
    log = (tmp_path / "audit.log").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in log.splitlines()]
    assert [(each["status"], each["why"], each["collection"]) for each in lines] == [
        (401, "missing", None),
        (403, "scope", None),
        (403, "row_rights", None),
        (201, None, "parts"),
    ]
    assert {(each["method"], each["route"]) for each in lines} == {("POST", "/v1/collections")}
    assert "4711" not in log

"""Secrets and texts are planted, the product is used and maltreated in every way there is, and all that it put out is
searched: what was printed, logged, answered, measured and recorded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from app.src.access.files import write_private
from app.src.access.keys import KeyRing
from app.src.access.principal import Principal
from app.src.cli import app as owl_sap
from app.src.service.search import Search
from app.src.service.service import Service
from app.src.settings import load
from connector.errors import ConnectorError
from hana_emulator.testing import Emulator
from tests.api.conftest import serving
from tests.forked import owl_sap as start_owl_sap
from tests.security.canaries import Canary

pytestmark = pytest.mark.xdist_group("canary")  # one worker makes the outputs

PASSWORD = Canary("the password of HANA", "Pw1-cAnAry\"ä'+/=?& x")
OTHER_PASSWORD = Canary("the password of the store's HANA", "Pw2-oTheR'cAnArY")
USER = Canary("the user of HANA", "CANARY_USER_7QX", frozenset({"config", "settings", "cli", "service"}))
API_KEY = Canary("the secret of an API key", "cAnAryKeY7QXd41d8cd98f00b204e9800998ecf8427e")
JWT = Canary("a token", "eyJhbGciOiJSUzI1NiJ9.eyJjYW5hcnkiOiI3UVgifQ.c2lnbmF0dXJlY2FuYXJ5")
CLAIM = Canary("a claim", "cl41m-cAnArY-7QX", frozenset({"answer", "keys", "key file"}))
ROW = Canary("the text of a row", 'r0w-cAnArY "7QX" \\n/', frozenset({"answer"}))
KEY = Canary("the key of a row", "k3y-RowKeyCanary-7QX", frozenset({"answer", "quarantine"}))
QUERY = Canary("a search text", 'qu3ry-cAnArY "7QX" ü', frozenset({"answer"}))
VALUE = Canary("a value in a filter", "v4lue-cAnArY'7QX", frozenset({"answer"}))
CANARIES = [PASSWORD, OTHER_PASSWORD, USER, API_KEY, JWT, CLAIM, ROW, KEY, QUERY, VALUE]
TOML = """
[hana]
host = "{host}"
port = {port}
user = '{user}'
encrypt = false
[store]
kind = "hana"
schema = "CANARY"
[embedding]
model = "hash:16"
[access]
audit = "audit.log"
keys = "keys.json"
[mcp]
http = true
write = true
[sync]
lease_wait = 1
[[collections]]
name = "materials"
source = "CANARY.MATERIALS"
template = "{{TEXT}}"
metadata = ["MTART", "NUMBER"]
row_rights = {{ MTART = "owner" }}
[[collections]]
name = "absent"
source = "CANARY.ABSENT"
template = "{{TEXT}}"
"""
ROWS = "/v1/collections/materials/rows"
SEARCH = "/v1/collections/materials/search"


def _bytes(text: object) -> bytes:
    return text if isinstance(text, bytes) else str(text).encode(errors="backslashreplace")


class Outputs:
    """What came out, by surface: the part before the colon is its kind."""

    def __init__(self) -> None:
        self.all: dict[str, bytes] = {}

    def add(self, surface: str, *texts: object) -> None:
        joined = b"\n".join(
            text if isinstance(text, bytes) else str(text).encode(errors="backslashreplace") for text in texts
        )
        assert joined.strip(), f"{surface} put nothing out, so nothing was looked at"
        self.all[f"{surface} ({len(self.all)})"] = joined


class Ground:
    def __init__(self, emulator: Emulator, folder: Path, environment: pytest.MonkeyPatch) -> None:
        self.emulator = emulator
        self.folder = folder
        self.environment = environment
        self.outputs = Outputs()
        self._runner = CliRunner()

    def run(self, sql: str, *rows: tuple[Any, ...], user: bool = False) -> None:
        login = {"user": USER.text, "password": PASSWORD.text} if user else {}
        with contextlib.closing(self.emulator.connect(autocommit=True, **login)) as connection:
            for row in rows or ((),):
                connection.cursor().execute(sql, row)

    def cli(self, surface: str, *arguments: str, stdin: str = "") -> int:
        """In this process, as `owl-sap` runs it."""
        result = self._runner.invoke(owl_sap, list(arguments), input=stdin)
        self.outputs.add(f"{surface}: {' '.join(arguments[:3])}", result.stdout, result.stderr, result.exception or "-")
        return result.exit_code


def keys() -> Iterator[dict[str, Any]]:
    """One that may do everything and sees the rows of its claim, one that may do little."""
    for number, scopes in (("aaaa", ["embed", "search", "sync", "admin", "metrics"]), ("bbbb", ["embed"])):
        digest = hashlib.sha256(bearer(number).encode()).hexdigest()
        more = {"claims": {"owner": CLAIM.text}, "created": "2026-01-01T00:00:00Z", "scopes": scopes}
        yield {"id": number, "name": f"key {number}", "sha256": digest, **more}


def bearer(number: str) -> str:
    return f"owl_{number}_{API_KEY.text}"


@pytest.fixture(scope="module")
def ground(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("canary")
    with pytest.MonkeyPatch.context() as environment:
        environment.chdir(folder)
        environment.setenv("HANA_PASSWORD", PASSWORD.text)
        toml = TOML.format(host=emulator.host, port=emulator.port, user=USER.text)
        (folder / "owl-sap.toml").write_text(toml, encoding="utf-8")
        write_private(folder / "keys.json", json.dumps({"version": 1, "keys": [*keys()]}).encode())
        ground = Ground(emulator, folder, environment)
        quoted = PASSWORD.text.replace('"', '""')
        ground.run('CREATE SCHEMA "CANARY"')
        ground.run(f'CREATE USER {USER.text} PASSWORD "{quoted}" NO FORCE_FIRST_PASSWORD_CHANGE')
        ground.run(
            f'GRANT SELECT, INSERT, UPDATE, DELETE, ALTER, INDEX, DROP, CREATE ANY ON SCHEMA "CANARY" TO {USER.text}'
        )
        ground.run(
            'CREATE COLUMN TABLE "CANARY"."MATERIALS" ("ID" NVARCHAR(3000) PRIMARY KEY, "TEXT" NVARCHAR(1000), '
            '"MTART" NVARCHAR(40), "NUMBER" NVARCHAR(40))'
        )
        rows = [(f"{KEY.text}{number}", f"{ROW.text} {number}", CLAIM.text, ROW.text) for number in range(5)]
        too_long = (KEY.text * 120, f"{ROW.text} 9", CLAIM.text, ROW.text)
        ground.run('INSERT INTO "CANARY"."MATERIALS" VALUES (?, ?, ?, ?)', *rows, too_long)
        try:
            yield ground
        finally:
            ground.run("ALTER SYSTEM CLEAR FAULTS")
            ground.run('DROP SCHEMA "CANARY" CASCADE')
            ground.run(f"DROP USER {USER.text} CASCADE")


@pytest.fixture(scope="module")
def outputs(ground: Ground) -> dict[str, bytes]:
    on_the_command_line(ground)
    hana_that_repeats_what_it_was_sent(ground)
    over_http(ground)
    over_pipes(ground)
    as_objects(ground)
    return ground.outputs.all


def on_the_command_line(ground: Ground) -> None:
    cli = ground.cli
    assert cli("config", "config", "show") == 0
    assert cli("config", "config", "show", "--json") == 0
    cli("cli", "doctor", "--json")
    assert cli("cli", "sync", "materials", "--json") == 0
    assert cli("cli", "sync", "materials", "--full", "--strict") == 1, "one row has a key that is too long"
    assert cli("cli", "sync", "absent") == 2
    assert cli("cli", "status", "--json") == 0
    cli("cli", "verify", "materials", "--json")
    assert cli("quarantine", "quarantine", "list", "materials", "--json") == 0
    assert cli("answer", "search", "materials", QUERY.text, "--json") == 0
    assert cli("answer", "search", "materials", "--like", f'["{KEY.text}1"]', "--json") == 0
    # An id that is not found is answered with an example, which is the key of a row, as in hits.
    assert cli("answer", "search", "materials", "--like", f'["{KEY.text}77"]') == 2
    for where in (
        {"MTART": {"$eqq": VALUE.text}},
        {"MTART": [VALUE.text]},
        {"NUMBER": {"$gt": 1}},
        {"a b": VALUE.text},
    ):
        assert cli("cli", "search", "materials", QUERY.text, "--filter", json.dumps(where)) == 2
    assert cli("cli", "search", "materials", "x", "--filter", f'{{"MTART": "{VALUE.text}') == 2
    assert cli("cli", "search", "absent", QUERY.text) == 2
    cli("cli", "embed", "--json", stdin=f"{QUERY.text}\n")
    cli("cli", "jobs", "list", "--json")
    assert cli("keys", "keys", "list", "--json") == 0
    assert cli("keys", "keys", "rotate", "bbbb", "--out", "new-key") == 0
    assert cli("keys", "keys", "revoke", "key cccc") == 2
    ground.environment.setenv("OWL_SAP_FAILPOINT", "mid_upsert:1:raise")
    ground.run('UPDATE "CANARY"."MATERIALS" SET "TEXT" = "TEXT" || \' changed\'')
    assert cli("cli", "--debug", "sync", "materials") == 4
    assert cli("cli", "sync", "materials") == 4
    ground.environment.delenv("OWL_SAP_FAILPOINT")
    ground.environment.setenv("HANA_PASSWORD", OTHER_PASSWORD.text)
    assert cli("cli", "status") == 3
    cli("cli", "doctor")
    assert cli("cli", "--debug", "sync", "materials") == 3
    ground.environment.setenv("HANA_PORT", OTHER_PASSWORD.text)
    assert cli("cli", "status") == 2, "a secret in the wrong variable is not repeated either"
    ground.environment.delenv("HANA_PORT")
    ground.environment.setenv("HANA_PASSWORD", PASSWORD.text)


def hana_that_repeats_what_it_was_sent(ground: Ground) -> None:
    """Its texts for bad data hold the data: so do these, with the codes that a row may meet, and one nobody knows.
    (Codes that speak of statements and their names are quoted: no statement of ours holds a value.)"""
    for code in (2, 129, 266, 274, 301, 305, 339, 461, 2048, 99999):
        text = f"cannot convert or insert: '{ROW.text}' of {KEY.text} by {USER.text} near \"{VALUE.text}\": {code}"
        fault = {"match": "INSERT INTO .*OWL_MATERIALS", "action": "error", "code": code, "text": text, "count": None}
        ground.run("ALTER SYSTEM CLEAR FAULTS")
        ground.run('UPDATE "CANARY"."MATERIALS" SET "TEXT" = "TEXT" || \'.\'')
        ground.run("ALTER SYSTEM INJECT FAULT '{}'".format(json.dumps(fault).replace("'", "''")))
        ground.cli("data", "sync", "materials", "--json")
    ground.run("ALTER SYSTEM CLEAR FAULTS")


def over_http(ground: Ground) -> None:
    records: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: records.append(logging.Formatter("%(name)s %(message)s").format(record))  # type: ignore[method-assign]
    handler.addFilter(lambda record: not record.name.startswith(("httpx", "httpcore")))  # of this test's client
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    loaded = load(None, folder=ground.folder)
    service = Service(loaded.settings, file=loaded.file)
    try:
        with serving(service) as client:
            _ask_in_vain(ground, client)
            client.headers["Authorization"] = f"Bearer {bearer('aaaa')}"
            _ask(ground, client)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(service.search, "run", _crash)
                refused(ground, client.post(SEARCH, json={"query": QUERY.text}), 500)
            ground.outputs.add("metrics", client.get("/metrics").content)
        logging.getLogger("owl").debug("the end")
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        service.close()
    ground.outputs.add("log", *records)
    ground.outputs.add("key file", (ground.folder / "keys.json").read_bytes())
    ground.outputs.add("audit", (ground.folder / "audit.log").read_bytes())
    for file in sorted((ground.folder / ".owl-sap").iterdir()):
        ground.outputs.add("state", file.name, file.read_bytes())
    ground.outputs.add("service", repr(service), repr(service.__dict__))


def _crash(*_: Any, **__: Any) -> None:
    raise RuntimeError(f"{ROW.text} {QUERY.text} {PASSWORD.text}")


def refused(ground: Ground, response: httpx.Response, status: int) -> None:
    assert response.status_code == status, response.text
    ground.outputs.add("refusal", response.content, response.headers)


def _ask_in_vain(ground: Ground, client: httpx.Client) -> None:
    """With credentials that are wrong in every way, and ones that are good and not enough."""
    for headers, status in (
        ({"Authorization": f"Bearer {JWT.text}"}, 401),
        ({"Authorization": f"Bearer owl_aaaa_{API_KEY.text[:-1]}"}, 401),
        ({"Authorization": f"Basic {API_KEY.text}"}, 401),
        ({"X-API-Key": bearer("cccc")}, 401),
        ({"X-API-Key": bearer("aaaa"), "Authorization": f"Bearer {JWT.text}"}, 401),
        ({"X-API-Key": bearer("bbbb")}, 403),
    ):
        refused(ground, client.post(SEARCH, json={"query": QUERY.text}, headers=headers), status)
    refused(ground, client.get("/v1/info", params={"api_key": bearer("aaaa")}), 401)


def _ask(ground: Ground, client: httpx.Client) -> None:
    said = ground.outputs.add
    where = {"MTART": VALUE.text, "NUMBER": VALUE.text, VALUE.text[:5]: 1}
    for mode in ("vector", "keyword", "hybrid"):
        answer = client.post(SEARCH, json={"query": QUERY.text, "mode": mode, "filter": where})
        assert answer.status_code in (200, 422)
        said("answer", answer.content, answer.headers)
    for body, status in (
        ({"query": QUERY.text, "filter": {"MTART": {"$eqq": VALUE.text}}}, 422),
        ({"query": QUERY.text, "filter": {"MTART": [VALUE.text]}}, 422),
        ({"query": QUERY.text, "k": VALUE.text}, 422),
        ({"query": QUERY.text, VALUE.text: 1}, 422),
        ({"query": [QUERY.text]}, 422),
        ({"query": QUERY.text, "k": 10_000}, 422),
    ):
        response = client.post(SEARCH, json=body)
        assert response.status_code == status, response.text
        said("answer" if VALUE.text in str(body.keys()) else "refusal", response.content)
    refused(ground, client.post(SEARCH, json={"like": f'["{KEY.text}77"]'}), 404)
    refused(ground, client.post(SEARCH, json={"like": VALUE.text, "mode": "hybrid"}), 422)
    refused(ground, client.post(ROWS, json={"ids": [QUERY.text] * 101}), 422)
    refused(ground, client.get("/v1/collections/materials/map", params={"color": VALUE.text}), 422)
    refused(ground, client.post(SEARCH, content=f'{{"query": "{QUERY.text}'.encode()), 422)
    refused(ground, client.post("/v1/collections/absent/search", json={"query": QUERY.text}), 404)
    refused(ground, client.post("/embed", json={"inputs": QUERY.text, "nonsense": 1}), 422)
    refused(ground, client.post("/v1/embeddings", json={"input": QUERY.text, "model": "another"}), 404)
    refused(ground, client.get("/v1/collections/materials/quarantine"), 403)
    refused(ground, client.get("/v1/nothing", params={"key": API_KEY.text[:3]}), 404)
    job = client.post("/v1/collections/materials/sync", json={"full": True}).json()["job"]
    for _ in range(3000):
        if client.get(f"/v1/jobs/{job}").json()["state"] in ("succeeded", "failed"):
            break
        time.sleep(0.02)
    for answer in (
        client.post(ROWS, json={"ids": [f'["{KEY.text}1"]', VALUE.text]}),
        client.get("/v1/collections/materials/fields"),
        client.get("/v1/collections/materials/map", params={"color": "MTART"}),
        client.post(SEARCH, json={"like": f'["{KEY.text}1"]'}),
    ):
        assert answer.status_code == 200, answer.text
        said("answer", answer.content, answer.headers)
    _ask_as_an_agent(ground, client)
    for path in (
        "/v1/info",
        "/v1/gpu",
        "/v1/collections",
        "/v1/jobs",
        f"/v1/jobs/{job}/events",
        "/openapi.json",
        "/health/ready",
        "/v1/models",
        "/v1/tables?schema=CANARY",
        "/v1/tables/CANARY/MATERIALS?catalog_only=true",
        "/v1/collections/materials/generations",
    ):
        said("rest", path, client.get(path).content)


def _ask_as_an_agent(ground: Ground, client: httpx.Client) -> None:
    """Through the tools: what they answer shows rows, what they refuse shows nothing."""
    for mode in ("vector", "hybrid"):
        for where in (None, {"MTART": VALUE.text}):
            arguments = {"collection": "materials", "query": QUERY.text, "mode": mode, "filter": where}
            ground.outputs.add("answer", _tool(client, "search", arguments).content)
    for tool in ("list_collections", "sync_status"):
        ground.outputs.add("rest", tool, _tool(client, tool, {}).content)
    ground.outputs.add("answer", _tool(client, "describe_collection", {"collection": "materials"}).content)
    search: dict[str, Any] = {"collection": "materials", "query": QUERY.text}
    calls: tuple[tuple[str, dict[str, Any]], ...] = (
        ("search", search | {"collection": "absent"}),
        ("search", search | {"collection": VALUE.text[:5]}),
        ("search", search | {"k": 10_000}),
        ("search", search | {"k": VALUE.text}),
        ("search", search | {"filter": {"MTART": {"$eqq": VALUE.text}}}),
        ("search", {"query": [QUERY.text]}),
        ("get_row", {"collection": "materials", "id": QUERY.text}),
        ("describe_collection", {"collection": "absent"}),
        ("no_tool", search),
    )
    for tool, arguments in calls:
        answer = _tool(client, tool, arguments)
        assert answer.json()["result"]["isError"], answer.text
        ground.outputs.add("refusal", answer.content)
    for body in (f'{{"jsonrpc": "2.0", "id": 1, "method": "{QUERY.text}', json.dumps([{"method": VALUE.text}])):
        refused(ground, client.post("/mcp", content=body.encode(), headers=_AGENT), 400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "run", _crash)
        ground.outputs.add("refusal", _tool(client, "search", search).content)


_AGENT = {"Accept": "application/json", "Content-Type": "application/json"}


def _call(tool: str, arguments: dict[str, Any], number: int = 1) -> dict[str, Any]:
    return {
        "jsonrpc": "2.0",
        "id": number,
        "method": "tools/call",
        "params": {"name": tool, "arguments": arguments},
    }


def _tool(client: httpx.Client, tool: str, arguments: dict[str, Any]) -> httpx.Response:
    answer = client.post("/mcp", json=_call(tool, arguments), headers=_AGENT)
    assert answer.status_code == 200, answer.text
    return answer


def over_pipes(ground: Ground) -> None:
    """`owl-sap mcp` with a key, and lines that are no messages."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OWL_SAP_MCP__KEY": bearer("aaaa")}
    pipe = subprocess.PIPE
    opening = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    hello = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": opening}
    search: dict[str, Any] = {"collection": "materials", "query": QUERY.text}
    messages = [
        {"jsonrpc": "2.0", "method": QUERY.text},
        hello,
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        _call("search", search, 1),
        _call("search", search | {"filter": {"MTART": {"$eqq": VALUE.text}}}, 2),
        _call("sync_status", {VALUE.text[:5]: QUERY.text}, 3),
    ]
    with (
        (ground.folder / "agent.log").open("wb") as log,
        start_owl_sap("mcp", cwd=ground.folder, env=environment, stdin=pipe, stdout=pipe, stderr=log) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"".join(json.dumps(each).encode() + b"\n" for each in messages))
        process.stdin.write(f"{QUERY.text} {PASSWORD.text}\n".encode())
        process.stdin.flush()
        answers = [process.stdout.readline() for _ in range(4)]
        process.stdin.close()
        assert process.wait(60) == 0
    ids = {json.loads(answer)["id"]: answer for answer in answers}
    assert set(ids) == {0, 1, 2, 3}
    ground.outputs.add("answer", ids[1])
    ground.outputs.add("refusal", ids[2], ids[0])
    ground.outputs.add("log", b"stderr of owl-sap mcp", (ground.folder / "agent.log").read_bytes())


def as_objects(ground: Ground) -> None:
    loaded = load(None, folder=ground.folder)
    settings = loaded.settings
    ground.outputs.add("settings", repr(settings), str(settings), settings.model_dump_json(), repr(loaded))
    principal = Principal("somebody", frozenset(("search",)), {"owner": CLAIM.text})
    ring = KeyRing(ground.folder / "keys.json")
    ring.open()
    known = ring.principal(bearer("aaaa"))
    ground.outputs.add("principal", repr(principal), str(principal), repr(known), repr(ring), repr(ring.__dict__))
    service = Service(settings.model_copy(update={"access": settings.access.model_copy(update={"audit": None})}))
    try:
        service.search.run("materials", QUERY.text, where={"NUMBER": {"$gt": 1}}, principal=principal)
    except ConnectorError as error:
        ground.outputs.add("error", repr(error), str(error), repr(error.__dict__))
    finally:
        service.close()


@pytest.mark.parametrize("canary", CANARIES, ids=lambda canary: canary.name)
def test_nothing_that_is_planted_comes_out(outputs: dict[str, bytes], canary: Canary) -> None:
    leaks = {
        surface: form
        for surface, output in outputs.items()
        if surface.partition(":")[0].partition(" (")[0] not in canary.allowed
        if (form := canary.found_in(output)) is not None
    }
    assert leaks == {}


def test_enough_was_looked_at(outputs: dict[str, bytes]) -> None:
    kinds = {surface.partition(":")[0].partition(" (")[0] for surface in outputs}
    assert kinds >= {
        "config",
        "cli",
        "data",
        "refusal",
        "rest",
        "metrics",
        "log",
        "audit",
        "state",
        "settings",
        "error",
    }
    assert len(outputs) > 60


@pytest.mark.parametrize("canary", CANARIES, ids=lambda canary: canary.name)
def test_what_is_planted_would_be_found(outputs: dict[str, bytes], canary: Canary) -> None:
    """In any form, and where it may be shown it is: the search looks at what the product puts out."""
    for form, text in canary.forms():
        assert canary.found_in(b"before " + text + b" behind") is not None, form
    if "answer" in canary.allowed and canary not in (QUERY, VALUE):
        assert any(canary.found_in(output) for surface, output in outputs.items() if surface.startswith("answer"))

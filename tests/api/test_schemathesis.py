"""Schemathesis walks the OpenAPI document against a service that is served: valid data and broken data for every
operation, and chains of operations by its links. What comes back must be what the document says, and never a 5xx.

Longer: `./scripts/test tests/api/test_schemathesis.py -m slow`. A failure shows the command that replays it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from httpx import Client

from app.src.access.keys import Grant, create
from app.src.service.service import Service
from app.src.settings import AccessSettings, Settings
from connector.model import KeyRange, Query, Row
from hana_emulator.testing import Emulator
from tests.api.conftest import TableSource, serving, settings_in

MOST = "100000000/day"
"""Requests: here nobody is limited."""
CONFIGURATION = Path(__file__).with_name("schemathesis.toml")
SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
CHECKS = {
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("response_headers_conformance", "unsupported_method", "allow_header_conformance", "negative_data_rejection"),
    *("missing_required_header", "ignored_auth", "use_after_free", "ensure_resource_availability"),
}
"""That must have looked at answers; `ignored_auth` has something to say where the document names a security scheme."""
NEVER = {
    "POST /v1/collections/{name}/generations": "nothing can be built, switched or dropped without another model",
    "POST /v1/collections": "there is no settings file here to write to",
    "POST /mcp": "off here: what its messages hold is MCP's to describe, and tests/agents asks by MCP's own client",
}
"""Operations that need not succeed here, and why."""
OF_JOBS = {"GET /v1/jobs/{job_id}", "GET /v1/jobs/{job_id}/events", "POST /v1/jobs/{job_id}/cancel"}
"""Reached by links alone, which a short walk may happen not to follow."""


@dataclass(frozen=True, slots=True)
class Served:
    """`headers`: what a request needs to be let in."""

    client: Client
    headers: Mapping[str, str]


class SlowSource(TableSource):
    """Jobs take long enough to be found running, followed and cancelled."""

    def pages(self, query: Query, size: int, within: KeyRange | None = None) -> Iterator[list[Row]]:
        for page in super().pages(query, size, within):
            time.sleep(0.02)
            yield page


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, emulator: Emulator) -> Iterator[Served]:
    """Rows in memory, tables of the emulator, vectors in a local store, the test embedder; a key is asked for."""
    schema = "SCHEMATHESIS"
    with_tables(emulator, schema)
    hana = {"host": emulator.host, "port": emulator.port, "user": emulator.user, "password": emulator.password}
    folder = tmp_path_factory.mktemp("schemathesis")
    given = settings_in(folder).model_dump(by_alias=True)
    access: dict[str, Any] = {"keys": folder / "keys.json"}
    if "failures" in AccessSettings.model_fields:
        access["failures"] = MOST
    changed = {"hana": {**hana, "encrypt": False, "schema": schema}, "access": access}
    changed["search"] = {"rerank": "tests.reranker:scores"}
    collections = [*given["collections"], {"name": "notes", "documents": True}]
    settings = Settings.model_validate(given | changed | {"collections": collections})
    key = create(folder / "keys.json", Grant("schemathesis", ("admin",), every_row=True, rate=MOST, concurrency=1000))[
        1
    ]
    service = Service(settings, source=SlowSource())
    try:
        service.sync.run("materials")
        with serving(service) as client:
            headers = {"Authorization": f"Bearer {key}"}
            client.headers.update(headers)
            yield Served(client, headers)
    finally:
        service.close()


def with_tables(emulator: Emulator, schema: str) -> None:
    """Those that schemathesis.toml names."""
    connection = emulator.connect(autocommit=True)
    cursor = connection.cursor()
    cursor.execute(f'CREATE SCHEMA "{schema}"')
    cursor.execute(f'CREATE TABLE "{schema}"."MARA" (MATNR NVARCHAR(18) PRIMARY KEY, MAKTX NVARCHAR(40))')
    cursor.execute(f'CREATE TABLE "{schema}"."T/1" (ID INTEGER, V REAL_VECTOR(3))')
    connection.close()


def walk(served: Served, folder: Path, seed: str, *options: str) -> list[dict[str, Any]]:
    """The events of a run with this seed, or that of OWL_SAP_TEST_SEED. Fails with what Schemathesis says."""
    seed = os.environ.get("OWL_SAP_TEST_SEED") or seed
    events = folder / "events.ndjson"
    command = [
        *(str(SCHEMATHESIS), "--config-file", str(CONFIGURATION), "--no-color", "run"),
        *(f"{served.client.base_url}/openapi.json", "--seed", seed, "--report-ndjson-path", str(events), *options),
        *(part for name, value in served.headers.items() for part in ("-H", f"{name}:{value}")),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    replay = f"replay with OWL_SAP_TEST_SEED={seed}"
    assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-2_000:]}\n{replay}"
    return [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]


@dataclass(slots=True)
class Walked:
    """`statuses`: by operation; `checks`: that looked at an answer."""

    statuses: dict[str, set[int]]
    checks: set[str]

    def add(self, other: Walked) -> None:
        for operation, statuses in other.statuses.items():
            self.statuses[operation] |= statuses
        self.checks |= other.checks


def seen_in(events: list[dict[str, Any]]) -> Walked:
    walked = Walked(defaultdict(set), set())
    for event in events:
        recorder = event.get("ScenarioFinished", {}).get("recorder", {})
        for case_id, case in recorder.get("cases", {}).items():
            operation = f"{case['value']['method']} {case['value']['path']}"
            response = (recorder.get("interactions", {}).get(case_id) or {}).get("response") or {}
            walked.statuses[operation].add(response.get("status_code", 0))
            walked.checks |= {check["name"] for check in recorder.get("checks", {}).get(case_id, ())}
    return walked


def operations(client: Client) -> set[str]:
    paths = client.get("/openapi.json").json()["paths"]
    return {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}


def check_walk(served: Served, walked: Walked) -> None:
    """Every operation was asked and answered well at least once; every one with a body refused something; every check
    had its say."""
    described = operations(served.client)
    assert len(described) >= 25
    assert described <= set(walked.statuses)
    unreached = {name for name in described - set(NEVER) if not walked.statuses[name] & {200, 202}}
    assert not unreached, "no request came through: nothing behind the checks of their input was tried"
    for name in described:
        if name.startswith("POST"):
            assert any(400 <= status < 500 for status in walked.statuses[name]), name
    assert walked.checks >= CHECKS


@pytest.mark.slow
def test_every_operation_answers_as_described_for_minutes(served: Served, tmp_path: Path) -> None:
    walked = seen_in(walk(served, tmp_path, a_seed(), "--max-examples", "150"))
    for _ in range(3):
        if all(walked.statuses[name] & {200, 202} for name in OF_JOBS):
            break
        walked.add(seen_in(walk(served, tmp_path, a_seed(), "--max-examples", "20", "--phases", "stateful")))
    check_walk(served, walked)


def a_seed() -> str:
    return str(random.SystemRandom().randrange(1 << 32))


def test_the_document_has_no_dangling_references(served: Served) -> None:
    document = served.client.get("/openapi.json").json()

    def references(part: Any) -> Iterator[str]:
        if isinstance(part, dict):
            if isinstance(reference := part.get("$ref"), str):
                yield reference
            for value in part.values():
                yield from references(value)
        elif isinstance(part, list):
            for value in part:
                yield from references(value)

    found = set(references(document))
    assert found
    for reference in found:
        place: Any = document
        for name in reference.removeprefix("#/").split("/"):
            assert name in place, reference
            place = place[name]


def test_links_name_operations_and_their_parameters(served: Served) -> None:
    document = served.client.get("/openapi.json").json()
    described = {each["operationId"]: each for path in document["paths"].values() for each in path.values()}
    answers = [answer for each in described.values() for answer in each["responses"].values()]
    links = [link for answer in answers for link in answer.get("links", {}).values()]
    assert len(links) >= 12
    for link in links:
        parameters = {parameter["name"] for parameter in described[link["operationId"]]["parameters"]}
        assert set(link["parameters"]) <= parameters


def test_a_refused_method_is_told_all_that_its_path_takes(served: Served) -> None:
    """The framework names those of the first route alone (found by Schemathesis)."""
    response = served.client.delete("/v1/collections/materials/generations")
    assert response.status_code == 405
    assert response.headers["allow"] == "GET, POST"

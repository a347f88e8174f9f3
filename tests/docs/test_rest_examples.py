"""The examples of app/src/api/examples.json: asked of a served application by curl, by our Python client and by
JavaScript, in their order; what it answers is what they show. docs/rest.md is made of them.

After a change of a route or an example: OWL_WRITE_DOCS=1 ./scripts/test tests/docs/test_rest_examples.py
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from app.src.api import openapi as page
from app.src.api.guard import ANYBODY, NEEDS, OPEN
from app.src.api.openapi import BASE, FILE, KEY, Example, curl, examples
from app.src.service.rerank import Reranker
from app.src.service.service import Service
from app.src.service.wiring import Parts
from app.src.settings import Settings
from app.src.settings.model import SearchSettings
from connector.model import Column
from hana_emulator.testing import Emulator
from owl_sap_client import Client, Retries
from tests.api.conftest import TableSource, serving
from tests.docs.sections import check_section

ME = "tests/docs/test_rest_examples.py"
WRITE = bool(os.environ.get("OWL_WRITE_DOCS"))
MATERIALS = {
    "000000000000001201": ("Gearbox, noise-damped, bearing steel", "FERT"),
    "000000000000001202": ("Garden hose, rubber, 25 m", "HAWA"),
    "000000000000001203": ("Hydraulic oil pump", "ERSA"),
    "000000000000001204": ("Office chair with wheels", "HAWA"),
}
BROKEN: dict[str, Any] = {"MATNR": "000000000000009999", "MAKTX": "Seal ring", "MTART": float("nan")}
SCHEMA, SHOWN_SCHEMA = "RESTDOCS", "SAPDEMO"
CHANGING = {"version", "fingerprint", "device", "settings", "path_reason", "reason", "toml"}
"""Members that another machine or version tells otherwise."""


class Materials(TableSource):
    def __init__(self) -> None:
        super().__init__()
        self.rows_by_key = {
            key: {"MATNR": key, "MAKTX": text, "MTART": kind} for key, (text, kind) in MATERIALS.items()
        }
        assert self.table.columns[1] == Column("MAKTX", "NVARCHAR", 40)


@dataclass
class Stage:
    """A service to which the examples are put, each in the state that it needs."""

    service: Service
    source: Materials
    url: str

    def before(self, example: Example) -> None:
        if example.needs == "running":
            self.source.gate.clear()
            job = self._started()
            assert job == example.path["job_id"]
            _until(lambda: self.service.jobs.get(job).state == "running")
        elif example.needs == "reranker":
            self.add_reranker()
        elif example.needs == "quarantined":
            self.source.rows_by_key[BROKEN["MATNR"]] = BROKEN
            self._started()
            self._settled()

    def add_reranker(self) -> None:
        """For /rerank alone: searches keep the order that they had."""
        settings = self.service.settings.model_copy(update={"search": SearchSettings(rerank="tests.reranker:scores")})
        self.service.reranker = Reranker(Parts(settings), self.service.metrics)

    def after(self) -> None:
        self.source.gate.set()
        self._settled()

    def _started(self) -> str:
        return str(httpx.post(f"{self.url}/v1/collections/materials/sync", json={}, timeout=60).json()["job"])

    def _settled(self) -> None:
        _until(lambda: all(job.over for job in self.service.jobs.all(None, None, 100)))


def _until(so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def stage(emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """Rows in memory, tables of the emulator, vectors in a local store, the test embedder. Ids of jobs are those that
    the examples name."""
    numbers = itertools.count(1)
    ids = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{next(numbers):032x}"))
    monkeypatch.setattr("app.src.jobs.journal.uuid", ids)
    _with_table(emulator)
    hana = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")} | {"encrypt": False}
    block = {"name": "materials", "source": "S.MARA", "template": "{MAKTX}", "metadata": ["MTART"]}
    settings = Settings.model_validate(
        {
            "hana": hana,
            "store": {"kind": "local", "path": tmp_path / "vectors"},
            "embedding": {"model": "hash:64"},
            "collections": [block, {"name": "notes", "documents": True}],
        }
    )
    file = tmp_path / "owl-sap.toml"
    file.write_text("", encoding="utf-8")
    source = Materials()
    service = Service(settings, source=source, file=file)
    try:
        service.sync.run("materials")
        with serving(service) as client:
            yield Stage(service, source, str(client.base_url).rstrip("/"))
    finally:
        source.gate.set()
        service.close()


def _with_table(emulator: Emulator) -> None:
    connection = emulator.connect(autocommit=True)
    cursor = connection.cursor()
    cursor.execute("SELECT COUNT(*) FROM SYS.SCHEMAS WHERE SCHEMA_NAME = ?", (SCHEMA,))
    if not cursor.fetchone()[0]:
        cursor.execute(f'CREATE SCHEMA "{SCHEMA}"')
        cursor.execute(
            f'CREATE COLUMN TABLE "{SCHEMA}"."MARA" ("MATNR" NVARCHAR(18) PRIMARY KEY, '
            "\"MAKTX\" NVARCHAR(40) COMMENT 'Material description', \"MTART\" NVARCHAR(4) COMMENT 'Material type') "
            "COMMENT 'General material data'"
        )
        for key, (text, kind) in MATERIALS.items():
            cursor.execute(f'INSERT INTO "{SCHEMA}"."MARA" VALUES (?, ?, ?)', (key, text[:40], kind))
    connection.close()


def described() -> dict[str, Any]:
    """Every operation that is served, as the description has it; what agents speak (/mcp) is no JSON of ours."""
    from app.src.api.server import create_app

    service = Service(Settings.model_validate({"embedding": {"model": "hash:8"}}))
    try:
        paths = create_app(service).openapi()["paths"]
    finally:
        service.close()
    return {
        f"{method.upper()} {path}": way
        for path, ways in paths.items()
        for method, way in ways.items()
        if path != "/mcp"
    }


# ------------------------------------------------------------------------------------------------------------ by curl


def test_curl_asks_what_the_examples_show(stage: Stage) -> None:
    if shutil.which("curl") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("curl is missing")
        pytest.skip("curl is missing")
    recorded = {}
    for example in examples():
        stage.before(example)
        answer = _by_curl(stage, example)
        stage.after()
        recorded[example.operation, example.case] = answer
        if not WRITE:
            assert alike(example.answer, answer), f"{example.operation} ({example.case}): {answer}; {__doc__}"
    if WRITE:
        _record(recorded)
        test_the_page()  # of what is recorded now, in whatever order the tests run


def _by_curl(stage: Stage, example: Example) -> Any:
    command = curl(example).replace(BASE, stage.url).replace(SHOWN_SCHEMA, SCHEMA)
    assert stage.url in command
    done = subprocess.run(
        ["sh", "-c", f"{command} --silent --show-error --max-time 20 -w '\\n%{{http_code}}'"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        env={"PATH": os.environ["PATH"], KEY: "any"},
    )
    text, _, status = done.stdout.rpartition("\n")
    assert int(status) == example.status, f"{command}\n{text}"
    return shown(text)


def shown(text: str) -> Any:
    """An answer as the page shows it: shortened, where it goes on in the same way."""
    text = text.replace(SCHEMA, SHOWN_SCHEMA)
    try:
        return _short(json.loads(text))
    except ValueError:
        kept = text.splitlines()
        return "\n".join(kept[:9] + ["..."] * (len(kept) > 9))


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)  # JavaScript writes 0 for 0.0
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    if isinstance(value, list):
        numbers = len(value) > 4 and all(isinstance(each, float | int) for each in value)
        return [_short(each) for each in value[: 3 if numbers else 12]]
    return value


def alike(recorded: Any, fresh: Any, name: str = "") -> bool:
    """The same members of the same types, the same words; times, figures and what belongs to a machine may differ."""
    if name in CHANGING:
        return True
    if isinstance(recorded, dict) and isinstance(fresh, dict):
        return recorded.keys() == fresh.keys() and all(alike(recorded[each], fresh[each], each) for each in fresh)
    if isinstance(recorded, list) and isinstance(fresh, list):
        return len(recorded) == len(fresh) and all(map(alike, recorded, fresh))
    if isinstance(recorded, str) and isinstance(fresh, str):
        return _without_times(recorded) == _without_times(fresh)
    if isinstance(recorded, bool) or isinstance(fresh, bool):
        return recorded is fresh
    numbers = int | float
    return (isinstance(recorded, numbers) and isinstance(fresh, numbers)) or recorded == fresh


def _without_times(text: str) -> str:
    if "\n" in text:  # a stream, figures for Prometheus: their first words
        return text.split()[0]
    return re.sub(r"\d{4}-\d\d-\d\d[T ][\d:.]+(Z|\+00:00)?", "TIME", text)


def _record(answers: dict[tuple[str, str], Any]) -> None:
    whole = json.loads(FILE.read_text(encoding="utf-8"))
    for each in whole:
        answer = answers.get((each["operation"], each.get("case", "example")))
        if answer is not None and not alike(each.get("answer"), answer):
            each["answer"] = answer
    FILE.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page.examples.cache_clear()


def test_a_difference_is_seen() -> None:
    assert alike({"a": [1, "x 2026-01-01T10:00:00Z"]}, {"a": [2.5, "x 2026-02-01T11:00:00Z"]})
    others: list[Any] = [
        {"a": [1]},
        {"a": [1, "y"]},
        {"b": []},
        {"a": [True, "x 2026-01-01T10:00:00Z"]},
        {"a": None},
        None,
    ]
    for other in others:
        assert not alike({"a": [1, "x 2026-01-01T10:00:00Z"]}, other)


# ---------------------------------------------------------------------------------------------------------- by Python


def test_python_asks_the_same(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    """The first request that an example sends is the one that stands beside it."""
    sent: list[httpx.Request] = []

    class Noting(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            sent.append(request)
            return super().handle_request(request)

    with Client(stage.url, "any", transport=Noting(), retries=Retries(most=0)) as client:
        for example in examples():
            stage.before(example)
            sent.clear()
            code = "\n".join(example.python).replace(SHOWN_SCHEMA, SCHEMA)
            exec(code, {"client": client, "job": example.path.get("job_id")})
            stage.after()
            _same(example, sent[0])
    assert "Hydraulic oil pump" in capsys.readouterr().out


def _same(example: Example, request: httpx.Request) -> None:
    wanted = httpx.URL(BASE + example.url.replace(SHOWN_SCHEMA, SCHEMA))
    assert (request.method, request.url.path) == (example.method, wanted.path), example.title
    assert dict(request.url.params) == dict(wanted.params), example.title
    body = json.loads(request.content) if request.content else {}
    assert {name: body.get(name) for name in example.body or {}} == (example.body or {}), example.title


# ------------------------------------------------------------------------------------------------------ by JavaScript


ASK = """\
const base = "http://127.0.0.1:8000", key = "...";  // in a program never in the code

async function ask(method, path, body) {
  const headers = { Authorization: `Bearer ${key}`, "Content-Type": "application/json" };
  const answer = await fetch(base + path, { method, headers, body: body && JSON.stringify(body) });
  const text = await answer.text();
  if (!answer.ok) throw new Error(`${answer.status} ${text}`);  // a problem document
  return answer.headers.get("Content-Type").startsWith("application/json") ? JSON.parse(text) : text;
}"""


def javascript(example: Example) -> str:
    body = "" if example.body is None else f", {json.dumps(example.body, ensure_ascii=False)}"
    return f'await ask("{example.method}", {json.dumps(example.url)}{body});'


SETTLE = """\
while ((await ask("GET", "/v1/jobs")).some((job) => !["succeeded", "failed", "cancelled"].includes(job.state)))
  await new Promise((done) => setTimeout(done, 10));"""


@pytest.mark.slow
def test_javascript_gets_the_same(stage: Stage) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is missing")
    those = list(examples())
    # A job that is to be cancelled is held back as long as its example takes.
    starts = {place for place, example in enumerate(those) if example.needs or not place}
    starts |= {place + 1 for place, example in enumerate(those) if example.needs == "running"}
    for start, end in itertools.pairwise(sorted({*starts, len(those)})):
        together = those[start:end]
        stage.before(together[0])
        answers = _by_node(node, stage, together)
        stage.after()
        for example, fresh in zip(together, answers, strict=True):
            assert WRITE or alike(example.answer, fresh), f"{example.operation} ({example.case}): {fresh}"


def _by_node(node: str, stage: Stage, together: list[Example]) -> list[Any]:
    """In one process, for each takes a while to start."""
    lines = [ASK.replace(BASE, stage.url), "const found = [];"]
    for example in together:
        lines += [f"found.push({javascript(example).replace(SHOWN_SCHEMA, SCHEMA).removesuffix(';')});"]
        if example.needs != "running":  # that one is held back
            lines.append(SETTLE)
    assert stage.url in lines[0]
    script = "\n".join([*lines, "console.log(JSON.stringify(found));"])
    command = [node, "--input-type=module", "-e", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [shown(each if isinstance(each, str) else json.dumps(each)) for each in json.loads(done.stdout)]


# ---------------------------------------------------------------------------------------------------------- the page


def operations() -> str:
    known, parts, group, before = described(), [], "", ""
    for example in examples():
        if example.group != group:
            group = example.group
            parts.append(f"### {group}\n")
        if example.operation != before:
            before = example.operation
            parts.append(f"#### `{before}`\n\n{_said(known[before])} {_scopes(before)}\n")
        parts.append(_example(example))
    return "\n".join(parts).strip()


def _said(operation: dict[str, Any]) -> str:
    return " ".join(str(operation["description"]).split())


def _scopes(operation: str) -> str:
    need = next(need for name, need in NEEDS.items() if name.replace(":path}", "}") == operation)
    if need in (OPEN, ANYBODY):
        return "Open to everybody." if need == OPEN else "Any scope."
    return f"Scope {' or '.join(f'`{scope}`' for scope in sorted(need))}."


def _example(example: Example) -> str:
    kind = "text" if isinstance(example.answer, str) else "json"
    answer = example.answer if kind == "text" else _compact(example.answer)
    blocks = (("bash", curl(example)), ("python", "\n".join(example.python)), ("js", javascript(example)))
    code = "\n".join(f"```{language}\n{source}\n```" for language, source in blocks)
    return f"**{example.title}**\n\n{code}\n\n`{example.status}`\n\n```{kind}\n{answer}\n```\n"


def _compact(value: Any, indent: str = "") -> str:
    """JSON with what fits into a line on one."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + len(indent) <= 116 or not isinstance(value, dict | list) or not value:
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(name)}: {_compact(each, inner)}" for name, each in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _compact(each, inner) for each in value) + f"\n{indent}]"


def test_the_page() -> None:
    check_section("docs/rest.md", "ask", f"```js\n{ASK}\n```", ME)
    check_section("docs/rest.md", "operations", operations(), ME)


# --------------------------------------------------------------------------------------------------- the description


def test_every_operation_is_described_with_examples() -> None:
    document = described()
    recorded = {each.operation for each in examples()}
    assert set(document) == recorded
    for name, operation in document.items():
        assert operation["summary"], name
        assert len(operation["description"]) > 20, name
        assert {"4XX", "5XX"} <= set(operation["responses"]), name
        assert {sample["lang"] for sample in operation["x-codeSamples"]} == {"Shell", "Python"}, name
        if "requestBody" in operation:
            assert operation["requestBody"]["content"]["application/json"]["examples"], name
        good = [answer for status, answer in operation["responses"].items() if status in ("200", "201", "202")]
        assert any(content.get("examples") for each in good for content in each["content"].values()), name


def test_every_refusal_has_an_example() -> None:
    for name, operation in described().items():
        for status in ("4XX", "5XX"):
            (content,) = operation["responses"][status]["content"].values()
            schema = content["schema"]
            assert "example" in schema or "$ref" in schema, name

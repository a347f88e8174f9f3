"""The API description: /openapi.json with examples (`examples.json`), and the script-free page /docs.
tests/docs/test_rest_examples.py records the examples' answers from a running application."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import FastAPI, Request, Response
from starlette.routing import Route

from app.src.api.guard import ANYBODY, MANUAL, NEEDS, OPEN
from app.src.settings import AccessSettings

FILE = Path(__file__).with_name("examples.json")
# The groups of operations, in the order of /docs.
TAGS = (
    "Search",
    "Embeddings",
    "Collections",
    "Rows and documents",
    "Jobs",
    "Quarantine",
    "Generations",
    "Tables",
    "Health and monitoring",
    "MCP",
)
BASE = "http://127.0.0.1:8000"
KEY = "OWL_SAP_API_KEY"
_JSON = "application/json"
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key or a token (JWT)."},
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "An API key or a token (JWT)."},
}


@dataclass(frozen=True, slots=True)
class Example:
    """`group`: one of TAGS. `operation` as "GET /v1/jobs/{job_id}". `python`: lines that use `client`, and `job` for
    the id in the path. `answer`: JSON or text; None: not recorded yet. `needs`: the state to set up before
    recording. `case`: the name of one of several examples."""

    group: str
    operation: str
    title: str
    python: list[str]
    status: int
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    case: str = "example"
    needs: str | None = None
    answer: Any = None

    @property
    def method(self) -> str:
        return self.operation.partition(" ")[0]

    @property
    def url(self) -> str:
        names = {name: quote(value, safe="") for name, value in self.path.items()}
        path = self.operation.partition(" ")[2].format_map(names)
        return f"{path}?{urlencode(self.query)}" if self.query else path


@cache
def examples() -> tuple[Example, ...]:
    return tuple(Example(**each) for each in json.loads(FILE.read_text(encoding="utf-8")))


def curl(example: Example) -> str:
    """Return a POSIX shell command; the key comes from a variable."""
    live = "-N " if example.operation.endswith("/events") else ""
    lines = [f"curl {live}{shlex.quote(BASE + example.url)}", f'-H "Authorization: Bearer ${KEY}"']
    if example.body is not None:
        lines.append(f"-H 'Content-Type: {_JSON}'")
        lines.append(f"-d {shlex.quote(json.dumps(example.body, ensure_ascii=False))}")
    elif example.method == "POST":
        lines.append("-X POST")
    return " \\\n  ".join(lines)


def described(make: Callable[[], dict[str, Any]], access: AccessSettings | None) -> Callable[[], dict[str, Any]]:
    """Return FastAPI's `make` with tags, titles, examples, code samples, and the scopes of each route."""
    last: dict[str, Any] | None = None

    def description() -> dict[str, Any]:
        nonlocal last
        if (document := make()) is last:
            return document
        last = document  # FastAPI builds it once, and again after routes were added
        document["tags"] = [{"name": name} for name in TAGS]
        for example in examples():
            method, _, path = example.operation.partition(" ")
            if operation := document["paths"].get(path, {}).get(method.lower()):
                _add_example(operation, example)
        if access is None:
            return document
        document.setdefault("components", {})["securitySchemes"] = _SCHEMES
        listed = {name.replace(":path}", "}"): need for name, need in NEEDS.items()}
        if access.open_metrics:
            listed["GET /metrics"] = OPEN
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                need = listed[f"{method.upper()} {path}"]
                operation["security"] = [{scheme: []} for scheme in _SCHEMES] if need else []
                if need and need != ANYBODY:
                    said = operation.get("description", "")
                    operation["description"] = f"{said}\n\nNeeds the scope {' or '.join(sorted(need))}.".strip()
        return document

    return description


def _add_example(operation: dict[str, Any], example: Example) -> None:
    def put(content: dict[str, Any], value: Any) -> None:
        content.setdefault("examples", {})[example.case] = {"summary": example.title, "value": value}

    samples = operation.setdefault("x-codeSamples", [])
    if not samples:  # the first example of an operation gives its title
        operation["tags"] = [example.group]
        operation["summary"] = example.title
        for parameter in operation.get("parameters", ()):
            given = {"path": example.path, "query": example.query}.get(parameter["in"], {})
            if parameter["name"] in given:
                parameter["example"] = given[parameter["name"]]
    for language, source in (("Shell", curl(example)), ("Python", "\n".join(example.python))):
        samples.append({"lang": language, "label": f"{language}: {example.title}", "source": source})
    if example.body is not None:
        put(operation["requestBody"]["content"][_JSON], example.body)
    answer = operation["responses"].get(str(example.status))
    if answer is not None and example.answer is not None:
        content = answer.setdefault("content", {})
        kind = _JSON if not isinstance(example.answer, str) else next(iter(content), "text/plain")
        put(content.setdefault(kind, {}), example.answer)


def add_docs(app: FastAPI, *, console: bool) -> None:
    """Serve /docs; `console`: link to the console."""

    @cache
    def page() -> bytes:
        return _page(app.openapi(), console=console).encode()

    async def manual(_: Request) -> Response:
        return Response(page(), media_type="text/html; charset=utf-8")

    style = Response(FILE.with_name("static").joinpath("docs.css").read_bytes(), media_type="text/css; charset=utf-8")
    for path, answer in ((MANUAL, manual), (f"{MANUAL}/style.css", style)):
        app.router.routes.append(Route(path, answer, methods=["GET"], include_in_schema=False))


def _page(document: Mapping[str, Any], *, console: bool) -> str:
    info, tags = document["info"], [each["name"] for each in document["tags"]]
    anchors = {tag: re.sub(r"\W+", "-", tag.lower()) for tag in [*tags, "Shapes"]}

    def shown(source: str) -> str:
        """Return a block of code in which references to shapes are links."""
        linked = re.sub(r"&quot;#/components/schemas/(\w+)&quot;", r'<a href="#\1">\1</a>', escape(source))
        return f'<pre tabindex="0">{linked}</pre>'

    def as_json(value: Any) -> str:
        return shown(json.dumps(value, indent=1, ensure_ascii=False))

    to_console = '<a href="/">Console</a> · ' if console else ""
    links = "".join(f'<li><a href="#{anchor}">{escape(tag)}</a>' for tag, anchor in anchors.items())
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<title>REST API – {escape(info["title"])}</title><link rel="stylesheet" href="{MANUAL}/style.css">',
        f"<header><h1>REST API of {escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info.get('description', ''))}</p>",
        f'<p>{to_console}<a href="/openapi.json">openapi.json</a></p>',
        f'<nav aria-label="Groups"><ul>{links}</ul></nav></header><main>',
    ]
    for tag in tags:
        parts.append(f'<h2 id="{anchors[tag]}">{escape(tag)}</h2>')
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                if operation["tags"] != [tag]:
                    continue
                what = f'<span class="method">{method.upper()}</span> <span class="path">{escape(path)}</span>'
                parts += [
                    f"<details><summary>{what}",
                    f'<span class="what">{escape(operation["summary"])}</span></summary>',
                    f"<p>{escape(operation.get('description', ''))}</p>",
                ]
                for sample in operation.get("x-codeSamples", ()):
                    parts.append(f"<h3>{escape(sample['label'])}</h3>{shown(sample['source'])}")
                answers = {status: each for status, each in operation["responses"].items() if "XX" not in status}
                for name, shape in (operation | {"responses": answers}).items():
                    if name in ("parameters", "requestBody", "responses"):
                        parts.append(f"<details><summary>{name}</summary>{as_json(shape)}</details>")
                parts.append("</details>")
    parts.append('<h2 id="shapes">Shapes</h2><details><summary>All request and response shapes</summary>')
    for name, schema in document.get("components", {}).get("schemas", {}).items():
        # The id is inside, because browsers open the element around a link's target.
        name = escape(name)
        parts.append(f'<details><summary>{name}</summary><div id="{name}">{as_json(schema)}</div></details>')
    return "\n".join([*parts, "</details></main></html>"])

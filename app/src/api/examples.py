"""Worked examples of every operation, for the description of the API, /docs and docs/rest.md: what is asked, by curl
and by our client, and what was answered. `examples.json` holds them; its answers were recorded from a served
application (tests/docs/test_rest_examples.py writes them and sees that they do not go stale).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

FILE = Path(__file__).with_name("examples.json")
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
"""The groups of operations, in the order of /docs."""
BASE = "http://127.0.0.1:8000"
KEY = "OWL_SAP_API_KEY"
_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Example:
    """`group`: one of TAGS. `operation` as "GET /v1/jobs/{job_id}". `python`: lines with `client`, and with `job` for
    the id in the path. `answer`: JSON, or the text of an answer of another kind; None: not recorded yet. `needs`: what
    must be so before (for the recording). `case` tells several examples of one operation apart."""

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
        """Path and query."""
        names = {name: quote(value, safe="") for name, value in self.path.items()}
        path = self.operation.partition(" ")[2].format_map(names)
        return f"{path}?{urlencode(self.query)}" if self.query else path


@cache
def examples() -> tuple[Example, ...]:
    return tuple(Example(**each) for each in json.loads(FILE.read_text(encoding="utf-8")))


def curl(example: Example) -> str:
    """A command for a POSIX shell; the key comes out of a variable."""
    lines = [f"curl {'-N ' if example.operation.endswith('/events') else ''}{shlex.quote(BASE + example.url)}"]
    lines.append(f'-H "Authorization: Bearer ${KEY}"')
    if example.body is not None:
        lines.append(f"-H 'Content-Type: {_JSON}'")
        lines.append(f"-d {shlex.quote(json.dumps(example.body, ensure_ascii=False))}")
    elif example.method == "POST":
        lines.append("-X POST")
    return " \\\n  ".join(lines)


def describe(document: dict[str, Any]) -> None:
    """Put tags, titles, examples and samples of code into the description of the API."""
    document["tags"] = [{"name": name} for name in TAGS]
    for example in examples():
        path = example.operation.partition(" ")[2]
        operation = document["paths"].get(path, {}).get(example.method.lower())
        if operation is not None:
            _describe(operation, example)


def _describe(operation: dict[str, Any], example: Example) -> None:
    samples = operation.setdefault("x-codeSamples", [])
    if not samples:  # the first of an operation is its title
        operation["tags"] = [example.group]
        operation["summary"] = example.title
        for parameter in operation.get("parameters", ()):
            given = {"path": example.path, "query": example.query}.get(parameter["in"], {})
            if parameter["name"] in given:
                parameter["example"] = given[parameter["name"]]
    for language, source in (("Shell", curl(example)), ("Python", "\n".join(example.python))):
        samples.append({"lang": language, "label": f"{language}: {example.title}", "source": source})
    if example.body is not None:
        _put(operation["requestBody"]["content"][_JSON], example, example.body)
    answer = operation["responses"].get(str(example.status))
    if answer is not None and example.answer is not None:
        content = answer.setdefault("content", {})
        kind = _JSON if not isinstance(example.answer, str) else next(iter(content), "text/plain")
        _put(content.setdefault(kind, {}), example, example.answer)


def _put(content: dict[str, Any], example: Example, value: Any) -> None:
    content.setdefault("examples", {})[example.case] = {"summary": example.title, "value": value}

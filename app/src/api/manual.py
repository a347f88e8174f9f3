"""The page about the API: every operation out of the OpenAPI document, as HTML without a script, and so without another
host to load one from. It works offline and under the strictest policy.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI, Request, Response

from app.src.api.headers import MANUAL

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 0 auto; padding: 1rem }
code, pre, .path { font-family: ui-monospace, monospace; font-size: .9rem }
pre { overflow: auto; padding: .6rem; border: 1px solid #8886; border-radius: .3rem }
summary { cursor: pointer }
table { border-collapse: collapse }
td, th { text-align: left; padding: .1rem .8rem .1rem 0; vertical-align: top }
.method { display: inline-block; min-width: 4rem; font-weight: 700 }
details { border-bottom: 1px solid #8883; padding: .4rem 0 }
"""
_METHODS = ("get", "post", "put", "patch", "delete")


def add(app: FastAPI) -> None:
    @functools.cache
    def page() -> str:
        return _page(app.openapi())

    async def manual(_: Request) -> Response:
        return Response(page(), media_type="text/html; charset=utf-8")

    async def style(_: Request) -> Response:
        return Response(_STYLE, media_type="text/css; charset=utf-8")

    app.add_route(MANUAL, manual, ["GET"], include_in_schema=False)
    app.add_route(f"{MANUAL}/style.css", style, ["GET"], include_in_schema=False)


def _page(document: Mapping[str, Any]) -> str:
    info = document["info"]
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(info["title"])}</title>',
        f'<link rel="stylesheet" href="{MANUAL}/style.css">',
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info.get('description', ''))}</p>",
        '<p>For programs: <a href="/openapi.json">openapi.json</a>. Shapes are named in the text and described '
        '<a href="#shapes">below</a>.</p>',
    ]
    for path, operations in document["paths"].items():
        for method in _METHODS:
            if method in operations:
                parts.extend(_operation(method.upper(), path, operations[method]))
    parts.append('<h2 id="shapes">Shapes</h2>')
    for name, schema in document.get("components", {}).get("schemas", {}).items():
        parts.append(f'<details id="{escape(name)}"><summary>{escape(name)}</summary>{_json(schema)}</details>')
    return "\n".join([*parts, "</html>"])


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    said = operation.get("description") or operation.get("summary", "")
    yield f'<details><summary><span class="method">{method}</span> <span class="path">{escape(path)}</span></summary>'
    yield f"<p>{escape(said)}</p>"
    rows = [
        (each["name"], f"{each['in']}{', required' if each.get('required') else ''}", each.get("schema", {}))
        for each in operation.get("parameters", ())
    ]
    if rows:
        yield "<h3>Parameters</h3><table>"
        for name, where, schema in rows:
            yield f"<tr><td><code>{escape(name)}</code><td>{escape(where)}<td><code>{_short(schema)}</code>"
        yield "</table>"
    body = operation.get("requestBody", {}).get("content", {})
    for kind, content in body.items():
        yield f"<h3>Body: {escape(kind)}</h3>{_shape(content.get('schema', {}))}"
    yield "<h3>Answers</h3><table>"
    for status, answer in operation.get("responses", {}).items():
        shapes = " ".join(_shape(content.get("schema", {})) for content in answer.get("content", {}).values())
        yield f"<tr><td>{escape(str(status))}<td>{escape(answer.get('description', ''))}<td>{shapes}"
    yield "</table>"
    for sample in operation.get("x-codeSamples", ()):
        yield f"<h3>{escape(sample['label'])}</h3><pre>{escape(sample['source'])}</pre>"
    yield "</details>"


def _shape(schema: Mapping[str, Any]) -> str:
    """A link where it has a name."""
    reference = schema.get("$ref") or next((each["$ref"] for each in schema.get("anyOf", ()) if "$ref" in each), None)
    if reference is None:
        return f"<code>{_short(schema)}</code>"
    name = escape(reference.rpartition("/")[2])
    return f'<a href="#{name}">{name}</a>'


def _short(schema: Mapping[str, Any]) -> str:
    if "properties" in schema:
        return escape(f"{{{', '.join(schema['properties'])}}}")
    return escape(json.dumps({key: value for key, value in schema.items() if key != "title"}))


def _json(schema: Mapping[str, Any]) -> str:
    return f"<pre>{escape(json.dumps(schema, indent=2, ensure_ascii=False))}</pre>"

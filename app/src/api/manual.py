"""The page about the API: every operation of the OpenAPI document, grouped by tag, as HTML without scripts. It needs no
other host, so it works offline and under the strictest policy.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI, Request, Response

from app.src.api.headers import MANUAL

_STYLE = """
:root {
  color-scheme: light dark;
  --text: light-dark(#16232a, #e6edef); --muted: light-dark(#50626b, #a5b6bd); --line: light-dark(#d5dde0, #2c3a40);
  --accent: light-dark(#0b5d6b, #7accd9); --surface: light-dark(#ffffff, #172024);
  font: 16px/1.5 system-ui, sans-serif;
}
* { box-sizing: border-box }
html { background: light-dark(#f4f6f7, #0f1518); color: var(--text); -webkit-text-size-adjust: 100% }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; overflow-wrap: break-word }
a { color: var(--accent) }
h1 { font-size: 1.5rem; margin: .5rem 0 } h2 { font-size: 1.15rem; margin: 1.75rem 0 .5rem }
h3 { font-size: 1rem; margin: 1rem 0 .35rem }
code, pre, .path { font-family: ui-monospace, monospace; font-size: .875rem }
pre { overflow: auto; max-height: 30rem; padding: .6rem; border: 1px solid var(--line); border-radius: .3rem }
nav ul { display: flex; flex-wrap: wrap; gap: .35rem 1rem; list-style: none; margin: 0 0 .5rem; padding: 0 }
summary { cursor: pointer; padding: .35rem 0 }
.scroll { overflow-x: auto }
table { border-collapse: collapse }
td, th { text-align: left; padding: .15rem .8rem .15rem 0; vertical-align: top }
td:first-child { white-space: nowrap }
.method { display: inline-block; min-width: 3.2rem; font-weight: 700; font-size: .875rem }
.what { display: block; color: var(--muted) }
details { border: 1px solid var(--line); border-radius: .4rem; background: var(--surface); margin: .35rem 0 }
details { padding: 0 .75rem }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px }
"""
_METHODS = ("get", "post", "put", "patch", "delete")


def add(app: FastAPI, *, console: bool) -> None:
    """`console`: it is served, so the page links to it."""

    @functools.cache
    def page() -> str:
        return _page(app.openapi(), console=console)

    async def manual(_: Request) -> Response:
        return Response(page(), media_type="text/html; charset=utf-8")

    async def style(_: Request) -> Response:
        return Response(_STYLE, media_type="text/css; charset=utf-8")

    app.add_route(MANUAL, manual, ["GET"], include_in_schema=False)
    app.add_route(f"{MANUAL}/style.css", style, ["GET"], include_in_schema=False)


def _page(document: Mapping[str, Any], *, console: bool) -> str:
    info = document["info"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    operations = [
        (method.upper(), path, each[method])
        for path, each in document["paths"].items()
        for method in _METHODS
        if method in each
    ]
    tags = [each["name"] for each in document["tags"]]
    to_console = '<a href="/">Console</a> · ' if console else ""
    links = "".join(f'<li><a href="#{_anchor(tag)}">{escape(tag)}</a>' for tag in [*tags, "Shapes"])
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<title>REST API – {escape(info["title"])}</title><link rel="stylesheet" href="{MANUAL}/style.css">',
        f"<header><h1>REST API of {title}</h1><p>{escape(info.get('description', ''))}</p>",
        f'<p>{to_console}<a href="/openapi.json">openapi.json</a></p>',
        f'<nav aria-label="Groups"><ul>{links}</ul></nav></header><main>',
    ]
    for tag in tags:
        parts.append(f'<h2 id="{_anchor(tag)}">{escape(tag)}</h2>')
        for method, path, operation in operations:
            if operation["tags"] == [tag]:
                parts.extend(_operation(method, path, operation))
    parts.append('<h2 id="shapes">Shapes</h2><details><summary>All request and response shapes</summary>')
    for name, schema in document.get("components", {}).get("schemas", {}).items():
        # The id is inside, because browsers open what encloses the target of a link.
        name = escape(name)
        parts.append(f'<details><summary>{name}</summary><div id="{name}">{_json(schema)}</div></details>')
    return "\n".join([*parts, "</details></main></html>"])


def _anchor(tag: str) -> str:
    return re.sub(r"\W+", "-", tag.lower())


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f'<details><summary><span class="method">{method}</span> <span class="path">{escape(path)}</span>'
    yield f'<span class="what">{escape(operation["summary"])}</span></summary>'
    yield f"<p>{escape(operation.get('description', ''))}</p>"
    rows = [
        (each["name"], f"{each['in']}{', required' if each.get('required') else ''}", each.get("schema", {}))
        for each in operation.get("parameters", ())
    ]
    if rows:
        yield '<h3>Parameters</h3><div class="scroll"><table>'
        for name, where, schema in rows:
            yield f"<tr><td><code>{escape(name)}</code><td>{escape(where)}<td><code>{_short(schema)}</code>"
        yield "</table></div>"
    body = operation.get("requestBody", {}).get("content", {})
    for kind, content in body.items():
        yield f"<h3>Body: {escape(kind)}</h3>{_shape(content.get('schema', {}))}"
    yield '<h3>Responses</h3><div class="scroll"><table>'
    for status, answer in operation.get("responses", {}).items():
        shapes = " ".join(_shape(content.get("schema", {})) for content in answer.get("content", {}).values())
        yield f"<tr><td>{escape(str(status))}<td>{escape(answer.get('description', ''))}<td>{shapes}"
    yield "</table></div>"
    for sample in operation.get("x-codeSamples", ()):
        yield f'<h3>{escape(sample["label"])}</h3><pre tabindex="0">{escape(sample["source"])}</pre>'
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
    return f'<pre tabindex="0">{escape(json.dumps(schema, indent=2, ensure_ascii=False))}</pre>'

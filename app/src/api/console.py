"""The console: its files, as they lie in static/, under / and /console/. They hold no data and need no credential; all
that it shows comes over the REST API, with the key of whoever looks. Knows no route but its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import FastAPI, Request, Response

from app.src.api.errors import NOT_MODIFIED, NotFound

HOME = "/"
FILES = "/console/{path:path}"
_PAGE = "index.html"
_TO_MANUAL = re.compile(rb"\s*<footer.*</footer>")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
}
"""What the console is made of. A file of another kind is not served."""
_ASK_EVERY_TIME = "no-cache"
"""Kept by browsers, but compared by its ETag before it is used: a new version of the service shows at once."""


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    headers: Mapping[str, str]


def add(app: FastAPI, *, manual: bool) -> None:
    """All files are read now (some 200 kB), and a path is a name in that table: it leads nowhere else on the disk.
    `manual`: /docs is served, so the page links to it."""
    static = dict(_files(files(__package__) / "static"))
    if not manual:
        static[_PAGE] = _file(_PAGE, _TO_MANUAL.sub(b"", static[_PAGE].content))

    async def home(request: Request) -> Response:
        return _answer(request, static[_PAGE])

    async def file(request: Request) -> Response:
        found = static.get(request.path_params["path"])
        if found is None:
            raise NotFound("the console has no such file")
        return _answer(request, found)

    app.add_route(HOME, home, ["GET"], include_in_schema=False)
    app.add_route(FILES, file, ["GET"], include_in_schema=False)


def _files(folder: Traversable, above: str = "") -> Iterator[tuple[str, _File]]:
    for each in folder.iterdir():
        path = above + each.name
        if each.is_dir():
            yield from _files(each, f"{path}/")
            continue
        if path[path.rfind(".") :] in _TYPES:
            yield path, _file(path, each.read_bytes())


def _file(path: str, content: bytes) -> _File:
    media_type = _TYPES[path[path.rfind(".") :]]
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return _File(content, {"Content-Type": media_type, "ETag": tag, "Cache-Control": _ASK_EVERY_TIME})


def _answer(request: Request, file: _File) -> Response:
    known = (tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(","))
    if file.headers["ETag"] in known:
        return Response(status_code=NOT_MODIFIED, headers=dict(file.headers))
    return Response(file.content, headers=dict(file.headers))

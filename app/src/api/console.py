"""The console's files in static/, under / and /console/. They hold no data and need no credential; the console reads
data over the REST API with its user's key."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import FastAPI, Request, Response

from app.src.api.errors import NotFound

HOME = "/"
FILES = "/console/{path:path}"
_PAGE = "index.html"
_TO_MANUAL = re.compile(rb"\s*<footer.*</footer>")
# Files of other kinds are not served.
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
}
# Browsers compare the ETag before each use, so a new version shows at once.
_ASK_EVERY_TIME = "no-cache"


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    headers: Mapping[str, str]


def add(app: FastAPI, *, manual: bool) -> None:
    """Read all files now (about 200 kB), so that a path is only a name in their table. `manual`: link to /docs."""
    static = dict(_files(files(__package__) / "static"))
    if not manual:
        static[_PAGE] = _file(_PAGE, _TO_MANUAL.sub(b"", static[_PAGE].content))

    async def home(request: Request) -> Response:
        return _answer(request, static[_PAGE])

    async def file(request: Request) -> Response:
        found = static.get(request.path_params["path"])
        if found is None:
            raise NotFound("file not found in the console")
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
        return Response(status_code=304, headers=dict(file.headers))
    return Response(file.content, headers=dict(file.headers))

"""Serve the console's files in static/ under / and /console/. They hold no data and need no credential; the console
reads data over the REST API with its user's key."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from fastapi import FastAPI, Request, Response

from app.src.api.errors import Refused

_STATIC = Path(__file__).with_name("static")
_PAGE = "index.html"
# Files of other kinds are not served.
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def add(app: FastAPI, *, manual: bool) -> None:
    """Read all files now (about 200 kB), so that a requested path is never opened. `manual`: link to /docs."""
    static: dict[str, tuple[bytes, dict[str, str]]] = {}
    for path in _STATIC.rglob("*"):
        if path.suffix in _TYPES:
            name, content = path.relative_to(_STATIC).as_posix(), path.read_bytes()
            if name == _PAGE and not manual:
                content = re.sub(rb"\s*<footer.*</footer>", b"", content)
            headers = {
                "Content-Type": f"{_TYPES[path.suffix]}; charset=utf-8",
                "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
                "Cache-Control": "no-cache",  # browsers compare the ETag before each use: a new version shows at once
            }
            static[name] = content, headers

    async def file(request: Request) -> Response:
        found = static.get(request.path_params.get("path", _PAGE))
        if found is None:
            raise Refused("NotFound", "file not found in the console")
        content, headers = found
        known = (tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(","))
        if headers["ETag"] in known:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    app.add_route("/", file, ["GET"], include_in_schema=False)
    app.add_route("/console/{path:path}", file, ["GET"], include_in_schema=False)

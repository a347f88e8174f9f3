"""What every answer tells browsers and caches: nothing of it may be framed, guessed at, kept or run. Plain ASGI."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NOTHING = b"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_MANUAL = _NOTHING.replace(b"default-src 'none';", b"default-src 'none'; style-src 'self';")
_CONSOLE = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Its own files and its own server, and nothing inline."""
_ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),  # for browsers that know no frame-ancestors
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-embedder-policy", b"require-corp"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)
_NEVER_KEPT = (b"cache-control", b"no-store")
_HTTPS_ONLY = (b"strict-transport-security", b"max-age=31536000")
MANUAL = "/docs"


def policy_for(path: str) -> bytes:
    """The Content-Security-Policy. Data has none of what a browser could load or run; the console (GET / and
    /console/...) has its own files."""
    if path == "/" or path.startswith("/console"):
        return _CONSOLE
    return _MANUAL if path == MANUAL or path.startswith(MANUAL + "/") else _NOTHING


class SecurityHeaders:
    """Adds what the answer does not have already. There is no CORS: no other site's script may read an answer."""

    def __init__(self, app: ASGIApp, hsts: bool) -> None:
        self._app = app
        self._hsts = hsts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                there = {name.lower() for name, _ in headers}
                wanted = [*_ALWAYS, _NEVER_KEPT, (b"content-security-policy", policy_for(scope["path"]))]
                if self._hsts and scope.get("scheme") == "https":
                    wanted.append(_HTTPS_ONLY)
                message["headers"] = headers + [each for each in wanted if each[0] not in there]
            await send(message)

        await self._app(scope, receive, sending)

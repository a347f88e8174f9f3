"""A small reverse proxy before several services: in turn, and to the next one where a connection is refused."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx


class Balancer:
    """`backends`: the URLs that get requests. Requests that are under way stay with theirs when it is taken out."""

    def __init__(self) -> None:
        self.backends: list[str] = []
        self._turn = itertools.count()
        self._client = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
        balancer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                answer = balancer.passed_on(self.command, self.path, self.rfile.read(self._length))
                self.send_response(answer.status_code)
                self.send_header("Content-Type", answer.headers.get("content-type", "text/plain"))
                self.send_header("Content-Length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

            do_POST = do_GET

            @property
            def _length(self) -> int:
                return int(self.headers.get("Content-Length") or 0)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def passed_on(self, method: str, path: str, body: bytes) -> httpx.Response:
        backends, turn = list(self.backends), next(self._turn)
        for offset in range(len(backends)):
            url = backends[(turn + offset) % len(backends)]
            try:
                return self._client.request(
                    method, url + path, content=body, headers={"Content-Type": "application/json"}
                )
            except httpx.ConnectError:
                continue
        return httpx.Response(502, text="no service answers")

    @contextmanager
    def running(self) -> Iterator[Balancer]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            self._client.close()

"""The server that `benchmarks/rest.py` measures, a child process of it: the product's own application and `serve`, over
an engine and a search that take no time, so that what is left is what REST costs. `bare`: uvicorn alone, with no
application to speak of. `keyed`: as `full`, with a key. `hashed`: nothing is a stub, and hash:384 is the engine,
behind its queue.

    python benchmarks/rest_server.py full|keyed|bare|hashed
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from app.src.access import keys  # noqa: E402
from app.src.api.server import serve  # noqa: E402
from app.src.service.search import Found, FoundHit  # noqa: E402
from app.src.service.service import Service  # noqa: E402
from app.src.settings import Settings  # noqa: E402
from connector.model import Vectors  # noqa: E402

DIMENSION, MOST = 384, 256


def stub(service: Service) -> None:
    """Return the same random unit vectors for all texts, with 4 tokens each, past the queue; and the same ten hits."""
    embedder = service.parts.embedder
    found = np.random.default_rng(1).standard_normal((MOST, DIMENSION))
    vectors = (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)

    def embed(texts: Sequence[str], **_: Any) -> Vectors:
        return vectors[: len(texts)]

    def embed_later(texts: Sequence[str], *, counted: Callable[[list[int]], None] | None = None, **_: Any) -> Any:
        if counted is not None:
            counted([4] * len(texts))
        done: Future[Vectors] = Future()
        done.set_result(embed(texts))
        return done

    def search(*_: Any, **__: Any) -> Found:
        hits = [
            FoundHit(
                f'["100","{number:018}"]',
                {"MANDT": "100", "MATNR": f"{number:018}"},
                0.7 - number / 100,
                "hydraulic pump 80 bar. stainless steel, DIN 933, leaks at the flange, released",
                {"MTART": "FERT", "MATKL": "017"},
            )
            for number in range(10)
        ]
        return Found(hits, {"embed": 3.1, "store": 0.9})

    embedder.embed, embedder.embed_later = embed, embed_later  # type: ignore[method-assign]
    service.search.run = search  # type: ignore[method-assign]


def announce(url: str, key: str = "x" * 43) -> None:
    """`key`: for the requests; ignored where none is configured."""
    print(json.dumps({"url": url, "key": key}), flush=True)


def full(folder: Path, kind: str) -> None:
    """`owl-sap serve`; `full` and `keyed` are so but for the engine and the search."""
    access, told = {}, announce
    if kind == "keyed":
        access["keys"] = folder / "keys.json"
        _, key = keys.create(access["keys"], keys.Grant("rest", ("admin",), rate="100000000/day", concurrency=10_000))
        told = partial(announce, key=key)
    block = {"name": "materials", "source": "S.MARA", "template": "{MAKTX}"}
    settings = Settings.model_validate(
        {
            "store": {"kind": "local", "path": folder / "vectors"},
            "embedding": {"model": f"hash:{DIMENSION}"},
            "access": access,
            "collections": [block],
        }
    )
    with contextlib.closing(Service(settings)) as service:
        if kind != "hashed":
            stub(service)
        serve(service, "127.0.0.1", 0, told)


async def _empty(scope: Any, receive: Any, send: Any) -> None:
    """Reads a request and answers it with two bytes: what no application on this server can go below."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-length", b"2"), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"[]"})


def bare() -> None:
    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            announce(f"http://{host}:{port}")

    config = uvicorn.Config(_empty, host="127.0.0.1", port=0, log_level="warning", access_log=False, lifespan="off")
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        Server(config).run()


def main(kind: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if kind == "bare":
        bare()
        return
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # records of jobs go there
        full(Path(folder), kind)


if __name__ == "__main__":
    main(sys.argv[1])

"""Between the routes and the service: threads, common limits, and JSON answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import anyio.to_thread
import numpy as np
import orjson
from anyio import CapacityLimiter
from fastapi import Response
from numpy.typing import NDArray

from app.src.api import schemas
from app.src.api.errors import TooMuch, Unprocessable
from app.src.service import Service

Result = TypeVar("Result")


class Json(Response):
    """JSON written by orjson, which takes NumPy arrays and writes NaN as null (none gets this far)."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def _is_text(text: str) -> bool:
    """Can it be written as UTF-8? Fast, for this is asked on the event loop."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Desk:
    """The service behind a bounded number of threads, so that waiting never blocks the event loop."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.limits = service.settings.api
        # Health has threads of its own: it must answer while every other thread waits for HANA.
        self._limiter = CapacityLimiter(self.limits.threads)
        self._health = CapacityLimiter(2)
        # What asks neither engine nor store: jobs, followed and cancelled, and metrics. It must answer just then when
        # all other threads, those for health too, wait for a HANA that does not answer.
        self._looks = CapacityLimiter(4)

    async def run(self, call: Callable[[], Result]) -> Result:
        return await anyio.to_thread.run_sync(call, limiter=self._limiter)

    async def probe(self, call: Callable[[], Result]) -> Result:
        return await anyio.to_thread.run_sync(call, limiter=self._health)

    async def look(self, call: Callable[[], Result]) -> Result:
        return await anyio.to_thread.run_sync(call, limiter=self._looks)

    def check_texts(self, texts: list[str], *, name: str) -> None:
        if not texts:
            raise Unprocessable(f"{name} is empty", param=name)
        if len(texts) > self.limits.max_inputs:
            limit = self.limits.max_inputs
            raise TooMuch(f"{len(texts)} texts; at most {limit} (setting api.max_inputs)", param=name)
        for position, text in enumerate(texts):
            if len(text) > self.limits.max_text_chars:
                limit = self.limits.max_text_chars
                what = f"{name}[{position}] has {len(text)} characters"
                raise TooMuch(f"{what}; at most {limit} (api.max_text_chars)", param=name)
            if not _is_text(text):
                raise Unprocessable(f"{name}[{position}] holds half a surrogate pair, which is no text", param=name)

    def embed(self, body: schemas.EmbedRequest) -> NDArray[np.float32]:
        engine = self.service.engine
        if not body.truncate:
            for position, tokens in enumerate(engine.count_tokens(body.texts)):
                if tokens > engine.max_tokens:
                    raise Unprocessable(
                        f"inputs[{position}] has {tokens} tokens, the model takes {engine.max_tokens}; "
                        'send "truncate": true to have it cut'
                    )
        return self.service.embed(body.texts, normalize=body.normalize)

"""The synchronous and asyncio clients. Most methods send the operation of the same name in `operations`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

import httpx

from owl_sap_client import operations
from owl_sap_client.errors import refused
from owl_sap_client.following import Following
from owl_sap_client.operations import Call
from owl_sap_client.results import Job, JobEvent, Row
from owl_sap_client.sending import Connection, Outcome, Retries, ended, finished, http_options, not_reached, pauses

P = ParamSpec("P")
T = TypeVar("T")
# Multiplies the retries of a request: a restarting service needs time to load a model.
_RESTART_FACTOR = 5


def _patient(retries: Retries) -> Retries:
    return replace(retries, most=_RESTART_FACTOR * retries.most)


def _now(operation: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    @functools.wraps(operation)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.send(operation(*args, **kwargs))

    return _as_method(method, operation)


def _later(operation: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    @functools.wraps(operation)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.send(operation(*args, **kwargs))

    return _as_method(method, operation)


Method = TypeVar("Method", bound=Callable[..., object])


def _as_method(method: Method, operation: Callable[..., object]) -> Method:
    """Give the method the operation's signature, for help() and editors."""
    shown = inspect.signature(operation)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = shown.replace(parameters=[this, *shown.parameters.values()])  # type: ignore[attr-defined]
    return method


class Client:
    """A client of the service at `url`. `key`: an API key or a token; default: the variable OWL_SAP_API_KEY.

    Connections are reused: create one client, share it between threads, and close it or use `with`. Methods raise the
    errors of `owl_sap_client.errors`.
    """

    def __init__(self, url: str, key: str | None = None, **connection: Unpack[Connection]) -> None:
        self._http = httpx.Client(**http_options(url, key, connection))
        self._retries = connection.get("retries", Retries())

    search = _now(operations.search)
    rows = _now(operations.rows)
    page = _now(operations.page)
    fields = _now(operations.fields)
    map_rows = _now(operations.map_rows)
    rerank = _now(operations.rerank)
    add_documents = _now(operations.add_documents)
    delete_documents = _now(operations.delete_documents)
    embed = _now(operations.embed)
    openai_embeddings = _now(operations.openai_embeddings)
    models = _now(operations.models)
    model = _now(operations.model)
    collections = _now(operations.collections)
    collection = _now(operations.collection)
    create_collection = _now(operations.create_collection)
    sync = _now(operations.sync)
    verify = _now(operations.verify)
    quarantine = _now(operations.quarantine)
    retry_quarantine = _now(operations.retry_quarantine)
    drop_quarantine = _now(operations.drop_quarantine)
    generations = _now(operations.generations)
    build_generation = _now(operations.build_generation)
    compare_generations = _now(operations.compare_generations)
    switch_generation = _now(operations.switch_generation)
    rollback_generation = _now(operations.rollback_generation)
    drop_generation = _now(operations.drop_generation)
    jobs = _now(operations.jobs)
    job = _now(operations.job)
    cancel = _now(operations.cancel)
    tables = _now(operations.tables)
    table = _now(operations.table)
    preview = _now(operations.preview)
    info = _now(operations.info)
    gpu = _now(operations.gpu)
    live = _now(operations.live)
    ready = _now(operations.ready)
    metrics = _now(operations.metrics)

    def send(self, call: Call[T], *, retries: Retries | None = None) -> T:
        """Send an operation. `retries`: None uses the client's own."""
        retries = retries or self._retries
        tried, outcome = 0, self._once(call)
        while (seconds := retries.wait(tried, outcome, repeatable=call.repeatable)) is not None:
            time.sleep(seconds)
            tried, outcome = tried + 1, self._once(call)
        return finished(call, outcome)

    def _once(self, call: Call[T]) -> Outcome:
        headers = {"Accept": call.accept}
        try:
            return self._http.request(call.method, call.url, params=call.query, json=call.body, headers=headers)
        except httpx.RequestError as error:
            return error

    def wait(self, job: str, *, timeout: float | None = None) -> Job:
        """Wait until a job has ended and return its record with the result. Raises JobFailed if it failed or was
        cancelled, WaitTimeout after `timeout` seconds. Survives a restart of the service."""
        waiting, patient = pauses(job, timeout), _patient(self._retries)
        while not (found := self.send(operations.job(job), retries=patient)).over:
            time.sleep(next(waiting))
        return ended(found)

    def events(self, job: str, *, after: int = 0) -> Iterator[JobEvent]:
        """Yield the events of a job after event `after`, past and future; the last is `result`. Reconnects by itself,
        even after a restart of the service."""
        following = Following(job, after)
        while not following.over:
            outcome: Outcome
            try:
                outcome = self._http.send(following.request(self._http), stream=True)
                try:
                    if outcome.status_code == 204:
                        return
                    if outcome.status_code == 200:
                        following.check(outcome)
                        for chunk in outcome.iter_bytes():
                            yield from following.feed(chunk)
                    else:
                        outcome.read()
                finally:
                    outcome.close()
            except httpx.RequestError as error:
                outcome = error
            time.sleep(_reconnect_pause(self._retries, following, outcome))

    def all_rows(
        self, collection: str, *, sort: str | None = None, filter: Mapping[str, Any] | None = None, limit: int = 200
    ) -> Iterator[Row]:
        """Yield the stored rows in an order, reading `limit` at a time. See `page`."""
        after: str | None = None
        while True:
            page = self.send(operations.page(collection, sort=sort, filter=filter, after=after, limit=limit))
            yield from page.rows
            if (after := page.next) is None:
                return

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._http.base_url)!r})"


def _reconnect_pause(retries: Retries, following: Following, outcome: Outcome) -> float:
    """Return the seconds until a lost stream is requested again, or raise its error when the retries are used up."""
    if following.over:
        return 0.0
    if isinstance(outcome, httpx.Response) and outcome.status_code == 200:
        outcome = httpx.RemoteProtocolError("the stream ended before the job", request=outcome.request)
    elif isinstance(outcome, httpx.Response) and outcome.status_code in (502, 504):  # a restart
        outcome = httpx.ReadError(f"{outcome.status_code} {outcome.reason_phrase}", request=outcome.request)
    elif isinstance(outcome, httpx.ReadTimeout):  # a live service sends a comment every 15 s
        outcome = httpx.ReadError(str(outcome), request=outcome.request)
    seconds = _patient(retries).wait(following.quiet, outcome, repeatable=True)
    following.quiet += 1
    if seconds is not None:
        return seconds
    if isinstance(outcome, httpx.Response):
        raise refused(outcome)
    raise not_reached(outcome) from outcome


class AsyncClient:
    """The asyncio client: the methods of Client as coroutines. Use each instance in one event loop."""

    def __init__(self, url: str, key: str | None = None, **connection: Unpack[Connection]) -> None:
        self._http = httpx.AsyncClient(**http_options(url, key, connection))
        self._retries = connection.get("retries", Retries())

    search = _later(operations.search)
    rows = _later(operations.rows)
    page = _later(operations.page)
    fields = _later(operations.fields)
    map_rows = _later(operations.map_rows)
    rerank = _later(operations.rerank)
    add_documents = _later(operations.add_documents)
    delete_documents = _later(operations.delete_documents)
    embed = _later(operations.embed)
    openai_embeddings = _later(operations.openai_embeddings)
    models = _later(operations.models)
    model = _later(operations.model)
    collections = _later(operations.collections)
    collection = _later(operations.collection)
    create_collection = _later(operations.create_collection)
    sync = _later(operations.sync)
    verify = _later(operations.verify)
    quarantine = _later(operations.quarantine)
    retry_quarantine = _later(operations.retry_quarantine)
    drop_quarantine = _later(operations.drop_quarantine)
    generations = _later(operations.generations)
    build_generation = _later(operations.build_generation)
    compare_generations = _later(operations.compare_generations)
    switch_generation = _later(operations.switch_generation)
    rollback_generation = _later(operations.rollback_generation)
    drop_generation = _later(operations.drop_generation)
    jobs = _later(operations.jobs)
    job = _later(operations.job)
    cancel = _later(operations.cancel)
    tables = _later(operations.tables)
    table = _later(operations.table)
    preview = _later(operations.preview)
    info = _later(operations.info)
    gpu = _later(operations.gpu)
    live = _later(operations.live)
    ready = _later(operations.ready)
    metrics = _later(operations.metrics)

    async def send(self, call: Call[T], *, retries: Retries | None = None) -> T:
        """Send an operation; see Client.send."""
        retries = retries or self._retries
        tried, outcome = 0, await self._once(call)
        while (seconds := retries.wait(tried, outcome, repeatable=call.repeatable)) is not None:
            await asyncio.sleep(seconds)
            tried, outcome = tried + 1, await self._once(call)
        return finished(call, outcome)

    async def _once(self, call: Call[T]) -> Outcome:
        headers = {"Accept": call.accept}
        try:
            return await self._http.request(call.method, call.url, params=call.query, json=call.body, headers=headers)
        except httpx.RequestError as error:
            return error

    async def wait(self, job: str, *, timeout: float | None = None) -> Job:
        """Wait for a job; see Client.wait."""
        waiting, patient = pauses(job, timeout), _patient(self._retries)
        while not (found := await self.send(operations.job(job), retries=patient)).over:
            await asyncio.sleep(next(waiting))
        return ended(found)

    async def events(self, job: str, *, after: int = 0) -> AsyncGenerator[JobEvent, None]:
        """Yield the events of a job; see Client.events. To stop early: `async with aclosing(client.events(job))`."""
        following = Following(job, after)
        while not following.over:
            outcome: Outcome
            try:
                outcome = await self._http.send(following.request(self._http), stream=True)
                try:
                    if outcome.status_code == 204:
                        return
                    if outcome.status_code == 200:
                        following.check(outcome)
                        async with aclosing(outcome.aiter_bytes()) as chunks:  # type: ignore[type-var]
                            async for chunk in chunks:
                                for event in following.feed(chunk):
                                    yield event
                    else:
                        await outcome.aread()
                finally:
                    await outcome.aclose()
            except httpx.RequestError as error:
                outcome = error
            await asyncio.sleep(_reconnect_pause(self._retries, following, outcome))

    async def all_rows(
        self, collection: str, *, sort: str | None = None, filter: Mapping[str, Any] | None = None, limit: int = 200
    ) -> AsyncGenerator[Row, None]:
        """Yield the stored rows in an order; see Client.all_rows."""
        after: str | None = None
        while True:
            page = await self.send(operations.page(collection, sort=sort, filter=filter, after=after, limit=limit))
            for row in page.rows:
                yield row
            if (after := page.next) is None:
                return

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._http.base_url)!r})"

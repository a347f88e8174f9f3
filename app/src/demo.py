"""The demo: a HANA emulator with sample data as a child process, synced and searched through the real driver. The
command line prints what the methods return.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import SecretStr

from app.src.access.principal import OPERATOR
from app.src.service.search import FoundHit
from app.src.service.service import Service
from app.src.settings import CollectionSettings, HanaSettings, Settings, StateSettings, StoreSettings
from connector.errors import ConfigurationError, Unavailable
from connector.extras import emulator_command

QUERIES = Path(__file__).with_name("demo.toml")
TOP = 3
_STEPS = {"page_rows": 64, "window": 64}  # small, so that the progress bar moves
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class DemoQuery:
    """`expect`: keys, any of which must be among the first `TOP` hits."""

    collection: str
    text: str
    expect: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The first hits of a query; `rank` of the first expected one, counted from 1, or None."""

    query: DemoQuery
    hits: Sequence[FoundHit]
    rank: int | None
    milliseconds: float

    @property
    def found(self) -> bool:
        return self.rank is not None

    def expected(self, hit: FoundHit) -> bool:
        return tuple(hit.key.values()) in self.query.expect

    def as_dict(self) -> dict[str, Any]:
        hits = [hit.as_dict() | {"expected": self.expected(hit)} for hit in self.hits]
        return {
            "collection": self.query.collection,
            "query": self.query.text,
            "rank": self.rank,
            "found": self.found,
            "milliseconds": self.milliseconds,
            "hits": hits,
        }


class Demo:
    """A context in which the emulator runs and the service is ready."""

    def __init__(self, settings: Settings) -> None:
        if settings.embedding.hashing:
            raise ConfigurationError(
                f'the demo needs a real model, "{settings.embedding.model}" is the test embedder; '
                "unset OWL_SAP_EMBEDDING__MODEL"
            )
        self._wanted = settings
        document = tomllib.loads(QUERIES.read_text(encoding="utf-8"))
        self._collections = tuple(CollectionSettings.model_validate(block) for block in document["collections"])
        self.queries = [_query(block) for block in document["queries"]]

    def __enter__(self) -> Demo:
        self._folder = tempfile.TemporaryDirectory(prefix="owl-sap-demo-")
        try:
            self._emulator = EmulatorProcess(Path(self._folder.name))
            settings = demo_settings(self._wanted, self._emulator.greeting, self._collections)
            state = StateSettings(path=Path(self._folder.name) / "state")
            self.service = Service(settings.model_copy(update={"state": state}))
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.service.close()
        finally:
            self._emulator.stop()
            self._folder.cleanup()

    @property
    def place(self) -> str:
        greeting = self._emulator.greeting
        return f"{greeting['host']}:{greeting['port']}"

    @property
    def names(self) -> list[str]:
        return self.service.collections.names

    def ask(self, query: DemoQuery) -> Answer:
        start = time.perf_counter()
        hits = self.service.search.run(query.collection, query.text, TOP, principal=OPERATOR).hits
        milliseconds = round((time.perf_counter() - start) * 1000, 1)
        ranks = [rank for rank, hit in enumerate(hits, 1) if tuple(hit.key.values()) in query.expect]
        return Answer(query, hits, ranks[0] if ranks else None, milliseconds)


def _query(block: Mapping[str, Any]) -> DemoQuery:
    return DemoQuery(block["collection"], block["text"], tuple(tuple(key) for key in block["expect"]))


def demo_settings(
    wanted: Settings, greeting: Mapping[str, Any], collections: tuple[CollectionSettings, ...]
) -> Settings:
    """Return settings with the demo's database and collections; engine, search and REST stay as configured."""
    hana = HanaSettings(
        host=greeting["host"],
        port=greeting["port"],
        user=greeting["user"],
        password=SecretStr(greeting["password"]),
        schema=greeting["schema"],
        encrypt=False,  # the emulator speaks plain text, on loopback
    )
    return Settings(
        hana=hana,
        store=StoreSettings(kind="hana", schema=greeting["schema"]),
        embedding=wanted.embedding,
        search=wanted.search,
        sync=wanted.sync.model_copy(update=_STEPS),
        api=wanted.api,
        collections=collections,
    )


class EmulatorProcess:
    """The emulator as a child process. `greeting`: host, port, user, password and schema, as its first line says."""

    def __init__(self, folder: Path, *, sample: bool = True) -> None:
        command = [*emulator_command(), "--port", "0", "--data", str(folder / "data")]
        command += ["--sample"] if sample else []
        self._log = (folder / "emulator.log").open("wb")
        # In a session of its own, so that Ctrl-C in the terminal ends this process first, which ends the emulator.
        self._process = subprocess.Popen(
            [*command, "--parent-pid", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        try:
            self.greeting: dict[str, Any] = self._first_line()
        except BaseException:
            self.stop()
            raise

    def _first_line(self) -> dict[str, Any]:
        stream: IO[bytes] | None = self._process.stdout
        assert stream is not None
        readable, _, _ = select.select([stream], [], [], _START_SECONDS)
        line = stream.readline() if readable else b""
        try:
            greeting: dict[str, Any] = json.loads(line)
        except ValueError:
            raise Unavailable(f"the emulator did not start: {self._last_words()}") from None
        return greeting

    def _last_words(self) -> str:
        self._log.flush()
        lines = Path(self._log.name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else f"no greeting within {_START_SECONDS:.0f} s"

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

"""The demo: a HANA emulator with sample data as a child process, synced and searched through the real driver."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from app.src.access.principal import OPERATOR
from app.src.service.service import Service
from app.src.settings import CollectionSettings, HanaSettings, Settings
from app.src.settings.model import StateSettings, StoreSettings
from connector.errors import ConfigurationError, Unavailable
from connector.extras import emulator_command

QUERIES = Path(__file__).with_name("demo.toml")
TOP = 3
_STEPS = {"page_rows": 64, "window": 64}  # small, so that the progress bar moves
_START_SECONDS = 120.0
_STOP_SECONDS = 30.0


class Demo:
    """A context in which the emulator runs and the service is ready."""

    def __init__(self, settings: Settings, model: str | None = None, *, scaled: bool = False) -> None:
        """`model` replaces the models of the collections; `scaled`: see Service."""
        if settings.embedding.hashing:
            raise ConfigurationError(
                f'the demo needs a real model, "{settings.embedding.model}" is the test embedder; '
                "unset OWL_SAP_EMBEDDING__MODEL"
            )
        self._wanted, self._scaled = settings, scaled
        document = tomllib.loads(QUERIES.read_text(encoding="utf-8"))
        self._blocks = QUERIES.read_text(encoding="utf-8").partition("[[queries]]")[0]
        # Each has `collection`, `text` and `expect`: keys, at least one of which must be among the first `TOP` hits.
        self.queries: list[dict[str, Any]] = document["queries"]
        examples = defaultdict(list)
        for query in self.queries:
            examples[query["collection"]].append(query["text"])
        replaced = {} if model is None else {"model": model}
        blocks = (block | replaced | {"examples": examples[block["name"]]} for block in document["collections"])
        self._collections = tuple(CollectionSettings.model_validate(block) for block in blocks)

    def __enter__(self) -> Demo:
        with ExitStack() as held:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="owl-sap-demo-")))
            greeting = held.enter_context(emulator(folder, "--sample"))
            self.place = f"{greeting['host']}:{greeting['port']}"
            wanted = self._wanted
            named = ("host", "port", "user", "password", "schema")
            # The emulator speaks plain text, on loopback.
            hana = {name: greeting[name] for name in named} | {"encrypt": False}
            settings = Settings(
                hana=HanaSettings.model_validate(hana),
                store=StoreSettings.model_validate({"kind": "hana", "schema": greeting["schema"]}),
                state=StateSettings(path=folder / "state"),
                embedding=wanted.embedding,
                search=wanted.search,
                sync=wanted.sync.model_copy(update=_STEPS),
                scale=wanted.scale.model_copy(update={"ranges": False}),  # workers would read the user's settings
                api=wanted.api,
                collections=self._collections,
            )
            file = folder / "owl-sap.toml"  # the console adds collections to it, until the demo ends
            file.write_text(self._blocks, encoding="utf-8")
            self.service = held.enter_context(closing(Service(settings, file=file, scaled=self._scaled)))
            self.names = self.service.collections.names
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def ask(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """Run a query and return its first hits; `rank`: position of the first expected hit, from 1, or None."""
        start = time.perf_counter()
        found = self.service.search.run(query["collection"], query["text"], TOP, principal=OPERATOR).hits
        milliseconds = round((time.perf_counter() - start) * 1000, 1)
        hits = [hit.as_dict() | {"expected": list(hit.key.values()) in query["expect"]} for hit in found]
        rank = next((rank for rank, hit in enumerate(hits, 1) if hit["expected"]), None)
        asked = {"collection": query["collection"], "query": query["text"]}
        return asked | {"rank": rank, "found": rank is not None, "milliseconds": milliseconds, "hits": hits}


@contextmanager
def emulator(folder: Path, *arguments: str) -> Iterator[dict[str, Any]]:
    """Run the emulator as a child process; yield host, port, user, password and schema from its first line."""
    command = [*emulator_command(), "--port", "0", "--data", str(folder / "data"), *arguments]
    with announced([*command, "--parent-pid", str(os.getpid())], folder) as (_, greeting):
        yield greeting


@contextmanager
def announced(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Start a child in `folder`, yield it with the JSON of its first line, and end it afterwards. `environment` None:
    inherited. Raises Unavailable, with the last line of the child's stderr, if no such JSON arrives."""
    with tempfile.TemporaryFile() as log:
        # In a session of its own, so that Ctrl-C in the terminal ends this process first, which ends the child.
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": log}
        process = subprocess.Popen(command, cwd=folder, env=environment, text=True, start_new_session=True, **streams)
        assert process.stdout is not None
        try:
            readable, _, _ = select.select([process.stdout], [], [], _START_SECONDS)
            line = process.stdout.readline() if readable else ""
            try:
                greeting: dict[str, Any] = json.loads(line)
            except ValueError:
                log.seek(0)
                words = log.read().decode(errors="replace").strip().splitlines()
                why = words[-1] if words else f"no greeting within {_START_SECONDS:.0f} s"
                raise Unavailable(f"the child process did not start: {why}") from None
            yield process, greeting
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

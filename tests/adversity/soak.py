"""A service on its schedule while rows change and clients search: what was answered, how fast, and what memory grew.

A row's text ends in its version, so an answer shows how old it is. Rows with even numbers never change.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.adversity.scene import NAME, Scene

CLIENTS = 4
PAUSE_SECONDS = 0.05
"""Of a client between two searches."""
WRITE_SECONDS = 0.5
"""Between two transactions that change rows: `CHANGED` updates, one deletion, one insertion."""
CHANGED = 8
TOML = """
[[collections]]
name = "rows"
source = "{schema}.ROWS"
template = "{{TXT}}"
metadata = ["GRP"]
schedule = {{ every = "2s" }}
"""
_TEXT = re.compile(r"pump (\d+) of plant (\d+) in state (\d+)")


def text_of(number: int, version: int = 0) -> str:
    return f"pump {number} of plant {number % 7} in state {version}"


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Sample:
    """Resident bytes after so many rows had been written."""

    rows: int
    service: int
    emulator: int


def growth(samples: list[tuple[int, int]]) -> float:
    """MB for each 1,000 rows written, from (rows, bytes): medians of the first and the last third, so that a single
    large allocation in either does not decide."""
    third = len(samples) // 3
    rows, resident = zip(*samples, strict=True)
    written = statistics.median(rows[-third:]) - statistics.median(rows[:third])
    more = statistics.median(resident[-third:]) - statistics.median(resident[:third])
    return float(more / 2**20 / (written / 1000))


@dataclass
class Soak:
    """`seconds` of searches beside writes, after `idle_seconds` of searches alone."""

    scene: Scene
    seconds: float
    idle_seconds: float
    idle: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    rows_written: int = 0
    slowness: float = 1.0
    """Elapsed time by CPU time of a thread that computes: what else the machine does."""
    _versions: dict[int, int] = field(default_factory=dict)
    """The newest version of every row that ever was, by number."""
    _seen: dict[int, int] = field(default_factory=dict)
    """The newest version that any search has returned, by number."""
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        (self.scene.folder / "owl-sap.toml").write_text(TOML.format(schema=self.scene.schema), encoding="utf-8")
        self._fill()
        with self._service() as (process, url), httpx.Client(base_url=url, timeout=60) as client:
            self._await_sync(client)
            self.idle = self._search_for(url, self.idle_seconds)
            self._over.clear()
            with ThreadPoolExecutor(2) as beside:
                watching = [beside.submit(self._write_rows), beside.submit(self._watch, process.pid)]
                try:
                    self.busy = self._search_for(url, self.seconds)
                finally:
                    self._over.set()
                for work in watching:
                    work.result()
            self._await_sync(client)

    def _fill(self) -> None:
        self.scene.run(f'DELETE FROM "{self.scene.schema}"."ROWS"')
        rows = [(number, text_of(number), f"G{number % 3}") for number in range(self.scene.rows)]
        self.scene.run('INSERT INTO "ROWS" VALUES (?, ?, ?)', *rows)
        self._versions = dict.fromkeys(range(self.scene.rows), 0)

    @contextmanager
    def _service(self) -> Iterator[tuple[subprocess.Popen[str], str]]:
        more = {
            "OWL_SAP_SYNC__PAGE_ROWS": "5000",
            "OWL_SAP_SYNC__WINDOW": "500",
            "OWL_SAP_EMBEDDING__MODEL": "hash:384",
            "OWL_SAP_EMBEDDING__QUERY_CACHE_MB": "0",  # it would grow until 10,000 texts have been searched for
        }
        with (
            (self.scene.folder / "serve.log").open("w") as log,
            self.scene.spawn("serve", "--port", "0", env=more, stderr=log) as process,
        ):
            assert process.stdout is not None
            try:
                yield process, json.loads(process.stdout.readline())["url"]
            finally:
                process.kill()

    def _await_sync(self, client: httpx.Client) -> None:
        """Until a sync that began after this call has succeeded."""
        response = client.post(f"/v1/collections/{NAME}/sync")
        while response.status_code == 409:  # the schedule's is under way
            time.sleep(0.05)
            response = client.post(f"/v1/collections/{NAME}/sync")
        job = response.raise_for_status().json()["job"]
        deadline = time.monotonic() + 120
        while (record := client.get(f"/v1/jobs/{job}").json())["state"] in ("queued", "running", "waiting"):
            assert time.monotonic() < deadline, record
            time.sleep(0.05)
        assert record["state"] == "succeeded", record

    # ------------------------------------------------------------------------------------------------ beside each other

    def _search_for(self, url: str, seconds: float) -> list[float]:
        until = time.monotonic() + seconds
        with ThreadPoolExecutor(CLIENTS) as clients:
            found = [clients.submit(self._search, url, seed, until) for seed in range(CLIENTS)]
            return [took for client in found for took in client.result()]

    def _search(self, url: str, seed: int, until: float) -> list[float]:
        chance, times = random.Random(seed), []
        with httpx.Client(base_url=url, timeout=60) as client:
            while time.monotonic() < until:
                number = chance.randrange(self.scene.rows)
                text = text_of(number, self._versions.get(number, 0))
                seen = dict(self._seen)
                began = time.monotonic()
                response = client.post(f"/v1/collections/{NAME}/search", json={"query": text, "mode": "hybrid"})
                times.append(time.monotonic() - began)
                self._check(number, response, seen)
                time.sleep(PAUSE_SECONDS)
        return times

    def _check(self, number: int, response: httpx.Response, seen: dict[int, int]) -> None:
        """A row that never changes is the best hit of its own text; no hit is a text that its row never had, or older
        than one that a search had returned before this one began."""
        if response.status_code != 200:
            self.wrong.append(f"status {response.status_code}: {response.text[:200]}")
            return
        hits = response.json()["hits"]
        if number % 2 == 0 and (not hits or hits[0]["text"] != text_of(number)):
            self.wrong.append(f"row {number} is not the best hit of its text: {[hit['text'] for hit in hits[:3]]}")
        for hit in hits:
            match = _TEXT.fullmatch(hit["text"])
            assert match is not None, hit["text"]
            row, plant, version = map(int, match.groups())
            if [row] != json.loads(hit["id"]) or plant != row % 7:
                self.wrong.append(f"{hit['id']} has the text of another row: {hit['text']}")
            if not seen.get(row, 0) <= version <= self._versions.get(row, 0):
                self.wrong.append(f"row {row} in version {version}, after {seen.get(row, 0)}")
            self._seen[row] = max(self._seen.get(row, 0), version)

    def _write_rows(self) -> None:
        """Rows with odd numbers change or go; others come, above all that were there at first."""
        chance, next_number = random.Random(1), self.scene.rows | 1
        there = [number for number in self._versions if number % 2]
        connection = self.scene.emulator.connect(currentSchema=self.scene.schema)
        with closing(connection):
            cursor = connection.cursor()
            while not self._over.wait(WRITE_SECONDS):
                *changed, deleted = chance.sample(there, CHANGED + 1)
                for number in changed:
                    self._versions[number] += 1  # before the commit: a search may see it at once
                    text = text_of(number, self._versions[number])
                    cursor.execute('UPDATE "ROWS" SET "TXT" = ? WHERE "K" = ?', (text, number))
                self._versions[next_number] = 0
                cursor.execute('INSERT INTO "ROWS" VALUES (?, ?, ?)', (next_number, text_of(next_number), "G0"))
                cursor.execute('DELETE FROM "ROWS" WHERE "K" = ?', (deleted,))
                connection.commit()
                there[there.index(deleted)] = next_number
                next_number += 2
                self.rows_written += CHANGED + 2

    def _watch(self, service: int) -> None:
        elapsed = computed = 0.0
        emulator = self.scene.emulator.process.pid
        while not self._over.wait(0.25):
            began, cpu = time.perf_counter(), time.thread_time()
            sum(range(200_000))
            elapsed, computed = elapsed + time.perf_counter() - began, computed + time.thread_time() - cpu
            self.samples.append(Sample(self.rows_written, resident_bytes(service), resident_bytes(emulator)))
        self.slowness = max(1.0, elapsed / computed)

    # ---------------------------------------------------------------------------------------------------- what was seen

    @property
    def warm(self) -> list[Sample]:
        """Without the first third: caches fill, threads get their first memory."""
        return self.samples[len(self.samples) // 3 :]

    def figures(self) -> dict[str, Any]:
        def milliseconds(times: list[float]) -> float:
            return round(statistics.median(times) * 1000, 1)

        first, warm, last = self.samples[0], self.warm[0], self.samples[-1]
        return {
            "searches": len(self.busy),
            "p50_ms": milliseconds(self.busy),
            "idle_p50_ms": milliseconds(self.idle),
            "slowness": round(self.slowness, 2),
            "rows_written": self.rows_written,
            "wrong": len(self.wrong),
            "service_mb": [sample.service >> 20 for sample in (first, warm, last)],
            "emulator_mb": [sample.emulator >> 20 for sample in (first, warm, last)],
            "service_mb_per_1000": round(growth([(s.rows, s.service) for s in self.warm]), 2),
            "emulator_mb_per_1000": round(growth([(s.rows, s.emulator) for s in self.warm]), 2),
        }

"""Syncs of key ranges on two Ray nodes of this machine, whose workers, nodes and drivers are killed while rows change;
then the store's own tables are compared with the source.

    python -m tests.adversity.kills [--rows 1000000] [--kills 300] [--seed 1] [--actors 4] [--out FILE]

The HANA is the emulator. `owl-sap sync NAME --scale ray` runs again and again, until one ends by itself with no kill
left. The seed decides who is killed, and when: after so many written rows or, while none is written, so much time. Rows
change, go and come meanwhile. A tenth of the rows is synced without kills, to compare the driver's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from app.src.benchmark.harness import Figure, Report
from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from benchmarks.program import at_most, main
from hana_emulator.testing import Emulator, running
from tests.adversity.scene import NAME, Scene
from tests.scaling import nodes

MODEL = "hash:64"
SHARES = {"node": 0.1, "driver": 0.06, "head": 1 / 150}  # of the kills; the rest are workers
CALM_SHARE = 0.1  # of the kills: of workers and nodes, in syncs at whose end all rows are checked
PAUSED_SECONDS = 12.0  # longer than Ray takes to notice that a node has gone
BUSY = "ray::Worker.run"  # title of a process that does a key range
IDLE_SECONDS = 1.0, 12.0  # between two kills while no rows are written
STILL_SECONDS = 900.0  # without a row or an end, after which a sync counts as hanging
RAY = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",  # after which a driver ends that has lost the head; default: 60
    # How often a worker asks whether its node's raylet is there: workers of a killed node go on. The default is 1 s.
    "RAY_raylet_death_check_interval_milliseconds": "60000",
    "RAY_health_check_period_ms": "1000",  # five failures in a row are the death of a node; the default is 3 s
}
HOT = 200  # rows that change again and again
WRITE_SECONDS, CHANGED = 0.5, 8  # between two transactions, and the updates of each; beside a deletion and an insertion
BATCH = 10_000
MOST_WRONG = 100  # violations to name
TABLE = "OWL_ROWS_G1"
VERSION = re.compile(r" in state (\d+)$")
GONE = 1 << 60  # as a version
TARGETS = {
    "violations": at_most(0),
    "syncs that ended with an error, neither driver nor head killed": at_most(0),
    "driver's memory, all rows minus a tenth": at_most(40),
}
TOML = """
[store]
kind = "hana"
schema = "{schema}"

[embedding]
model = "{model}"

[sync]
page_rows = {page}
window = {page}

[scale]
ranges = true
threads = 1

[[collections]]
name = "rows"
source = "{schema}.ROWS"
template = "{{TXT}} in state {{V}}"
metadata = ["GRP"]
chunk = {{ max_tokens = 12, overlap = 2 }}
"""


def text_of(key: int) -> str:
    """Return a text without its version. One of a hundred becomes several chunks."""
    words = f"pump {key} of plant {key % 7}"
    return f"{words}, " + " ".join(f"part{part}" for part in range(30)) if key % 200 == 6 else words


def group_of(key: int) -> str:
    return f"G{key % 3}"


def plan(kills: int, chance: random.Random) -> tuple[list[str], list[str]]:
    """Return who is killed while rows change, and who afterwards: a node and workers; each in random order."""
    kinds = Counter({kind: max(round(share * kills), kind == "node") for kind, share in SHARES.items()})
    kinds["worker"] = kills - kinds.total()
    calm = Counter(node=1, worker=max(round(CALM_SHARE * kills), 2) - 1)
    both = list((kinds - calm).elements()), list(calm.elements())
    for each in both:
        chance.shuffle(each)
    return both


# ---------------------------------------------------------------------------------------------------------- the cluster


class TwoNodes:
    """A cluster with two nodes, each with room for all workers. A killed node is replaced."""

    def __init__(self, folder: Path, cpus: int, variables: Mapping[str, str]) -> None:
        self._token = folder / "token"
        self._token.write_text("a" * 64)
        self._token.chmod(0o600)
        mine = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token)}
        self._variables = {**variables, **mine, **RAY}
        self._folder, self._cpus, self._count = folder, cpus, 0
        self._starting = ThreadPoolExecutor(1, "second-node")
        self._first, self._second = ExitStack(), ExitStack()

    def __enter__(self) -> TwoNodes:
        self.address, self._head = self._first.enter_context(nodes.head(self._place(), self._cpus, **self._variables))
        self._pending = self._starting.submit(self._start_second)
        self._pending.result()
        return self

    def __exit__(self, *error: object) -> None:
        self._pending.exception()
        self._second.close()
        self._first.close()

    def variables(self) -> dict[str, str]:
        """Return the environment of a driver."""
        scale = {"OWL_SAP_SCALE__ADDRESS": self.address, "OWL_SAP_SCALE__TOKEN_PATH": str(self._token)}
        return self._variables | scale

    def kill_second(self) -> bool:
        """Kill the second node if it does a key range, and start another one without waiting for it. Its workers stand
        still from before its end until after others have taken their place, and then go on."""
        if not self._pending.done() or not (workers := self._workers({self._other.pid}, BUSY)):
            return False
        for pid in workers:
            send(pid, signal.SIGSTOP)
            threading.Timer(PAUSED_SECONDS, send, (pid, signal.SIGCONT)).start()
        self._second.close()
        self._pending = self._starting.submit(self._start_second)
        return True

    def kill_head(self) -> None:
        """Kill the first node; the second one ends without it. Then `restart`."""
        self._pending.result()
        nodes.kill(self._head)

    def restart(self) -> None:
        self.__exit__()
        self.__enter__()

    def workers(self) -> list[int]:
        """Return the ids of the workers' processes."""
        return self._workers({self._head.pid, *({self._other.pid} if self._pending.done() else ())})

    def _workers(self, sessions: set[int], title: str = "ray::Worker") -> list[int]:
        return sorted(pid for pid, session, command in processes() if session in sessions and title in command)

    def _start_second(self) -> None:
        node = nodes.second(self._place(), self.address, self._cpus, **self._variables)
        self._other = self._second.enter_context(node)

    def _place(self) -> Path:
        self._count += 1
        return self._folder / f"r{self._count}"


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def processes() -> Iterator[tuple[int, int, str]]:
    """Yield id, session and command of every process."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            session = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[3])
            yield int(folder.name), session, (folder / "cmdline").read_text(errors="replace")


def peak_bytes(pid: int) -> int:
    """Return the most resident memory that a process ever had; 0 once it has ended."""
    with suppress(OSError):
        if found := re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()):
            return int(found[1]) << 10
    return 0


# ------------------------------------------------------------------------------------------------------------ the syncs


@dataclass
class Syncs:
    """Syncs of a table that `fill` made. `plan`: who is still to be killed, the next one last."""

    scene: Scene
    cluster: TwoNodes
    rows: int
    actors: int
    page: int
    chance: random.Random
    plan: list[str] = field(default_factory=list)
    started: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    peak: int = 0
    """The most resident memory of any driver, in bytes."""
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    _calm: bool = False
    _deleted: list[int] = field(default_factory=list)
    _headless: bool = False
    _written: int = 0
    """Chunks that were ever written."""
    _wanted: int = 0
    _moved: float = 0.0
    """When rows were written, or a sync began."""
    _quiet: float = 0.0
    """The same, or when someone was killed."""
    _due: tuple[int, float] = (0, 0.0)
    """When to kill next: at so many chunks, or after so many quiet seconds."""

    def __post_init__(self) -> None:
        self._wanted = self.rows
        self._free = set(range(3, 2 * self.rows, 4))  # keys of no row; those of `_change_rows` are 1, 5, 9 ...

    def run(self, calm: list[str]) -> None:
        """Sync until a sync ends by itself with no kill left; then change rows between syncs only, with the kills of
        `calm`. What the last sync should have done is left to no other."""
        with self._beside(self._watch_versions):
            with self._beside(self._change_rows, random.Random(self.chance.random())):
                while not self.sync() or self.plan:
                    if self.reports and self.plan:
                        self._want_more()
            self._calm = True
            self.plan = calm
            self._want_more()
            while not self.sync() or self.plan:
                self._want_more()

    @contextmanager
    def _beside(self, work: Callable[..., None], *arguments: Any) -> Iterator[None]:
        """Run `work` in a thread, with a cursor and an event that ends it."""
        over = threading.Event()
        with (
            closing(self.scene.emulator.connect(currentSchema=self.scene.schema)) as connection,
            ThreadPoolExecutor(1) as thread,
        ):
            future = thread.submit(work, connection, over, *arguments)
            try:
                yield
            finally:
                over.set()
            future.result()

    def _want_more(self) -> None:
        """Change a tenth of the rows, insert a fiftieth, and forget the syncs before."""
        self._wanted = self._written
        self._change(10)
        new = self.chance.sample(sorted(self._free), self.rows // 50)
        self._free.difference_update(new)
        insert(self.scene, new)
        self._wanted += len(new)
        self.reports.clear()

    def _change(self, step: int) -> None:
        """Change each row of `step`."""
        changed = f'MOD("K", {2 * step}) = {2 * self.chance.randrange(step)}'
        self.scene.run(f'UPDATE "ROWS" SET "V" = "V" + 1 WHERE {changed}')
        self._wanted += self.rows // step

    def sync(self) -> bool:
        """Run `owl-sap sync` to its end. Return whether it ended well."""
        self.started += 1
        before = self.killed["head"]
        log = self.scene.folder / "sync.log"
        with log.open("w") as errors, self._driver(errors) as driver:
            self._moved = time.monotonic()
            self._choose_moment()
            while driver.poll() is None:
                self._watch(driver)
                time.sleep(0.1)
            out = driver.communicate()[0]
        if self._headless:
            self.cluster.restart()
            self._headless = False
        if driver.returncode == 0:
            self.reports += json.loads(out)
        elif driver.returncode != -signal.SIGKILL and self.killed["head"] == before:
            self.failed.append(f"exit {driver.returncode}: {log.read_text()[-1000:]}")
            assert len(self.failed) < 10, self.failed
        return driver.returncode == 0

    @contextmanager
    def _driver(self, errors: Any) -> Iterator[subprocess.Popen[str]]:
        scaled = ("--scale", "ray", "--actors", str(self.actors))
        with owl_sap(self.scene, "sync", NAME, "--json", *scaled, errors=errors, **self.cluster.variables()) as driver:
            try:
                yield driver
            finally:
                driver.kill()

    def _watch(self, driver: subprocess.Popen[str]) -> None:
        """Note memory and progress; kill when it is time."""
        self.peak = max(self.peak, peak_bytes(driver.pid))
        written, now = self._count_written(), time.monotonic()
        if written > self._written:
            self._written, self._moved, self._quiet = written, now, now
        assert now - self._moved < STILL_SECONDS, (self.scene.folder / "sync.log").read_text()[-2000:]
        due = written >= self._due[0] or now - self._quiet >= self._due[1]
        if self.plan and not self._headless and due and driver.poll() is None:
            kind = self.plan.pop()
            if not self._kill(kind, driver):
                self.plan.insert(len(self.plan) - 1, kind)  # after the next one
            else:
                self.killed[kind] += 1
                counts = (
                    f"{written} chunks, {self.started} syncs, {len(self.failed)} failed, killed {dict(self.killed)}"
                )
                sys.stderr.write(f"{time.strftime('%X')} {counts}\n")
            self._choose_moment()

    def _choose_moment(self) -> None:
        """Choose when to kill next. The kills that are left are spaced over the rows that are left to store."""
        gap = max(self._wanted - self._written, 0) // (len(self.plan) + 1)
        self._quiet = time.monotonic()
        self._due = self._written + self.chance.randint(1, 2 * gap + 1), self.chance.uniform(*IDLE_SECONDS)

    def _kill(self, kind: str, driver: subprocess.Popen[str]) -> bool:
        """Return whether there was one to kill."""
        match kind:
            case "driver":
                driver.kill()
                driver.wait()
                if self.chance.random() < 0.5:  # as if its lease had expired, while its workers may still be writing
                    self.scene.expire_lease()
            case "node":
                if not self.cluster.kill_second():
                    return False
                if not self._calm:  # some rows of each page that a worker has in hand
                    self._change(self.page // 8)
            case "head":
                self.cluster.kill_head()
                self._headless = True
            case _:
                if not (workers := self.cluster.workers()):
                    return False  # none has started yet
                send(self.chance.choice(workers), signal.SIGKILL)
        return True

    def _count_written(self) -> int:
        if not self._written and not exists(self.scene, TABLE):
            return 0
        return self.scene.run(f'SELECT MAX("ID") FROM "{TABLE}"')[0][0] or 0

    def _change_rows(self, connection: Any, over: threading.Event, chance: random.Random) -> None:
        """Change, delete and insert rows."""
        hot = [key for key in range(0, 2 * self.rows, max(2, 2 * (self.rows // HOT))) if "," not in text_of(key)]
        used, cursor = set[int](), connection.cursor()
        while not over.wait(WRITE_SECONDS):
            while (new := 4 * chance.randrange(self.rows // 2) + 1) in used:
                pass
            used.add(new)
            *changed, deleted = chance.sample(hot, CHANGED + 1)
            for key in changed:
                cursor.execute('UPDATE "ROWS" SET "V" = "V" + 1 WHERE "K" = ?', (key,))
            cursor.execute('DELETE FROM "ROWS" WHERE "K" = ?', (deleted,))
            cursor.execute('INSERT INTO "ROWS" VALUES (?, ?, ?, 0)', (new, text_of(new), group_of(new)))
            connection.commit()
            hot[hot.index(deleted)] = new
            self._deleted.append(deleted)

    def _watch_versions(self, connection: Any, over: threading.Event) -> None:
        """Watch that no row goes back in the store."""
        versions, cursor = Versions(self.page), connection.cursor()
        while not over.wait(WRITE_SECONDS):
            if self._written:
                self.wrong += list(versions.look(cursor, list(self._deleted)))
                connection.commit()


def fill(scene: Scene, rows: int, page: int) -> None:
    """Write the settings, and the table in place of the scene's own."""
    settings = TOML.format(schema=scene.schema, model=MODEL, page=page)
    (scene.folder / "owl-sap.toml").write_text(settings, encoding="utf-8")
    scene.run('DROP TABLE "ROWS"')
    columns = '"K" INTEGER PRIMARY KEY, "TXT" NVARCHAR(500), "GRP" NVARCHAR(3), "V" INTEGER'
    scene.run(f'CREATE COLUMN TABLE "ROWS" ({columns})')
    insert(scene, range(0, 2 * rows, 2))


def insert(scene: Scene, keys: Sequence[int]) -> None:
    for start in range(0, len(keys), BATCH):
        some = [(key, text_of(key), group_of(key)) for key in keys[start : start + BATCH]]
        scene.run('INSERT INTO "ROWS" VALUES (?, ?, ?, 0)', *some)


@contextmanager
def owl_sap(scene: Scene, *arguments: str, errors: Any, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """`owl-sap ARGUMENTS`, with the settings of the scene's folder and the login in the environment."""
    with subprocess.Popen(
        [sys.executable, "-m", "app", *arguments],
        cwd=scene.folder,
        env=login(scene) | variables,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    ) as process:
        yield process


def login(scene: Scene) -> dict[str, str]:
    return {name: value for name, value in scene.variables().items() if not name.startswith(("OWL_SAP_", "RAY_"))}


@dataclass
class Versions:
    """In which version each row was last seen in the store: GONE once it is not there any more. Of the records, the
    last `overlap` are read again, because others may be committed between them."""

    overlap: int
    newest: dict[int, int] = field(default_factory=dict)
    last: int = 0

    def look(self, cursor: Any, deleted: Iterable[int]) -> Iterator[str]:
        """Read what was written since the last call. Yield which rows went back. `deleted`: rows of the source."""
        sql = f'SELECT "ID", "SRC_KEY", "VEC_TEXT" FROM "{TABLE}" WHERE "ID" > ? ORDER BY "ID"'
        cursor.execute(sql, (self.last - self.overlap,))
        for self.last, id_, text in cursor.fetchall():
            if found := VERSION.search(text):
                yield from self.note(int(id_[1:-1]), int(found[1]))
        asked = [key for key in deleted if self.newest.get(key, GONE) != GONE][:HOT]
        if asked:
            places = ", ".join("?" * len(asked))
            cursor.execute(
                f'SELECT "SRC_KEY" FROM "{TABLE}" WHERE "SRC_KEY" IN ({places})', [f"[{key}]" for key in asked]
            )
            self.newest |= dict.fromkeys(set(asked) - {int(id_[1:-1]) for (id_,) in cursor.fetchall()}, GONE)

    def note(self, key: int, version: int) -> Iterator[str]:
        earlier = self.newest.get(key, 0)
        if version < earlier:
            yield f"row {key} was {'gone' if earlier == GONE else f'in version {earlier}'}, then in version {version}"
        self.newest[key] = version


# ------------------------------------------------------------------------------------------------- what the store holds


def violations(scene: Scene, embedder: EngineEmbedder) -> Iterator[str]:
    """Yield what is wrong in the store, by its tables and by the product."""
    wanted = {
        key: (f"{text} in state {version}", group)
        for page in pages(scene, "ROWS", "K", '"K", "TXT", "GRP", "V"')
        for key, text, group, version in page
    }
    yield from wrong_records(scene, wanted, embedder)
    yield from left_behind(scene)
    yield from as_the_product_sees_it(scene, len(wanted))


def wrong_records(scene: Scene, wanted: Mapping[int, tuple[str, str]], embedder: EngineEmbedder) -> Iterator[str]:
    """Yield what is wrong in the table of vectors. `wanted`: the text and the group of each row by its key."""
    whole, models = Counter[int](), set[str]()
    pieces: dict[int, list[tuple[int, str]]] = {}
    columns = '"ID", "SRC_KEY", "CHUNK_NO", "VEC_TEXT", "VEC_META", "VEC_VECTOR", "CONTENT_HASH", "MODEL_ID"'
    for page in pages(scene, TABLE, "ID", columns):
        for _, id_, number, text, meta, _, digest, model in page:
            key = json.loads(id_)[0]
            expected, group = wanted.get(key, ("", ""))
            if not expected:
                yield f"{id_} is stored, and is no row"
            elif json.loads(str(meta)) != {"GRP": group} or len(digest) != 32:
                yield f"{id_} has the metadata {meta} and the digest {digest!r}"
            if (number, text) == (0, expected):
                whole[key] += 1
            else:
                pieces.setdefault(key, []).append((number, text))
            models.add(model)
        yield from wrong_vectors([row[3] for row in page], [row[5] for row in page], embedder)
    for key, (text, _) in wanted.items():
        if (whole[key], key in pieces) != (1, False) and (whole[key] or not covers(sorted(pieces.get(key, [])), text)):
            yield f"[{key}] should be {text!r}: it is stored {whole[key]} times as that, and as {pieces.get(key)}"
    if len(models) > 1:
        yield f"models {models}"


def exists(scene: Scene, table: str) -> bool:
    found = f"SELECT 1 FROM SYS.TABLES WHERE SCHEMA_NAME = '{scene.schema}' AND TABLE_NAME = '{table}'"
    return bool(scene.run(found))


def pages(scene: Scene, table: str, key: str, columns: str) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the rows of a table in the order of its key, the first column."""
    after = -1
    while rows := scene.run(f'SELECT {columns} FROM "{table}" WHERE "{key}" > {after} ORDER BY "{key}" LIMIT {BATCH}'):
        yield rows
        after = rows[-1][0]


def wrong_vectors(texts: Sequence[str], vectors: Sequence[bytes], embedder: EngineEmbedder) -> Iterator[str]:
    """Yield the texts whose vectors are not those that the model gives. In HANA's binary form a count comes first."""
    found = np.stack([np.frombuffer(vector, "<f4", offset=4) for vector in vectors])
    right = np.isclose(found, embedder.embed_documents(texts), atol=1e-6).all(axis=1)
    yield from (f"the vector of {text!r} is another" for text, good in zip(texts, right, strict=True) if not good)


def covers(pieces: Sequence[tuple[int, str]], text: str) -> bool:
    """Return whether the chunks, in order of their numbers, are pieces of the text that leave out nothing."""
    begin = end = 0
    for place, (number, piece) in enumerate(pieces):
        at = text.find(piece, begin)
        if number != place or at < 0 or text[end:at].strip():
            return False
        begin, end = at + 1, at + len(piece)
    return end == len(text)


def left_behind(scene: Scene) -> Iterator[str]:
    """Yield what a run left in the store's other tables."""
    for table in ("OWL_QUARANTINE", "OWL_LEASE_PARTS"):
        if exists(scene, table) and (rows := scene.run(f'SELECT COUNT(*) FROM "{table}"')[0][0]):
            yield f"{table} has {rows} rows"
    held = scene.run('SELECT "COLLECTION", "LEASE_OWNER" FROM "OWL_STATE" WHERE "LEASE_UNTIL" > CURRENT_UTCTIMESTAMP')
    yield from (f"{owner} still has the lease of {name}" for name, owner in held)
    if (names := scene.run('SELECT "COLLECTION", "TABLE_NAME" FROM "OWL_STATE"')) != [(NAME, TABLE)]:
        yield f"collections {names}"


def as_the_product_sees_it(scene: Scene, rows: int) -> Iterator[str]:
    log = scene.folder / "check.log"
    for verb in ("verify", "sync"):
        with log.open("w") as errors, owl_sap(scene, verb, NAME, "--json", errors=errors) as process:
            out = process.communicate()[0]
        if process.returncode:
            yield f"`owl-sap {verb}` exits with {process.returncode}: {log.read_text()[-1000:]} {out[-1000:]}"
        elif verb == "sync":
            found = json.loads(out)[0]
            changed = {name: found[name] for name in ("upserted", "deleted", "embedded_texts", "quarantined", "empty")}
            if any(changed.values()) or found["unchanged"] != rows:
                yield f"a sync of {rows} unchanged rows found {found}"


# ---------------------------------------------------------------------------------------------------------- the program


def new_scene(emulator: Emulator, schema: str, folder: Path, embedder: EngineEmbedder) -> Scene:
    with closing(emulator.connect(autocommit=True)) as administrator:
        administrator.cursor().execute(f"CREATE SCHEMA {schema}")
    return Scene(emulator, schema, "hana", folder / schema.lower(), embedder, rows=1)


def spread(given: argparse.Namespace, report: Report) -> Iterator[Figure]:
    chance = random.Random(given.seed)
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="owl-", ignore_cleanup_errors=True)))
        embedder = EngineEmbedder(held.enter_context(load_engine(EngineOptions(model=MODEL))))
        emulator = held.enter_context(running("--data", str(folder / "hana")))
        few, many = (new_scene(emulator, schema, folder, embedder) for schema in ("FEW", "MANY"))
        fill(few, given.rows // 10, given.page)
        fill(many, given.rows, given.page)
        cluster = held.enter_context(TwoNodes(folder, given.actors, login(many)))
        tenth = Syncs(few, cluster, given.rows // 10, given.actors, given.page, chance)
        assert tenth.sync(), tenth.failed
        yield Figure(
            "rows a second, a tenth of the rows without kills", [tenth.reports[0]["rows_per_second"]], "rows/s"
        )
        storm, calm = plan(given.kills, chance)
        syncs = Syncs(many, cluster, given.rows, given.actors, given.page, chance, storm)
        start = time.perf_counter()
        syncs.run(calm)
        seconds = time.perf_counter() - start
        for kind, count in sorted(syncs.killed.items()):
            yield Figure(f"killed: {kind}", [count], "")
        yield Figure("syncs started", [syncs.started], "")
        yield Figure("seconds", [seconds], "s")
        yield Figure("rows a second", [given.rows / seconds], "rows/s")
        megabytes = [each.peak / 2**20 for each in (tenth, syncs)]
        yield Figure("driver's memory, a tenth of the rows", megabytes[:1], "MB")
        yield Figure("driver's memory, all rows", megabytes[1:], "MB")
        name = "driver's memory, all rows minus a tenth"
        yield Figure(name, [megabytes[1] - megabytes[0]], "MB", TARGETS[name])
        name = "syncs that ended with an error, neither driver nor head killed"
        yield Figure(name, [len(syncs.failed)], "", TARGETS[name])
        wrong = [*syncs.wrong, *violations(many, embedder)]
        yield Figure("violations", [len(wrong)], "", TARGETS["violations"])
        report.notes += [*syncs.failed, *wrong[:MOST_WRONG]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--page", type=int, default=1000, help="[sync] page_rows and window")


if __name__ == "__main__":
    main("kills", __doc__ or "", {"spread": spread}, add_options)

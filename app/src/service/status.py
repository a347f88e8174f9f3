"""The state of the collections and of the service, for REST, the command line and the metrics."""

from __future__ import annotations

import importlib.metadata
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.src.core.backends.packaged import PACKAGED
from app.src.core.nvml import snapshot_within
from app.src.jobs.journal import StateUnusable
from app.src.observe.gpu import gpu_missing
from app.src.observe.metrics import Metrics, Sample, gpu_samples
from app.src.service.background import Background
from app.src.service.collections import Collections
from app.src.service.wiring import Parts
from connector.model import CollectionStatus
from connector.stores.store import VectorStore
from connector.sync.feeds.watermark import behind
from connector.sync.schema import WRITTEN

if TYPE_CHECKING:
    from app.src.core.engine import Engine

DISTRIBUTION = "owl-sap-connector"
GPU_WITHIN = 2.0  # seconds to wait for NVIDIA's driver: it needs 50 ms a card, but may hang after a card has failed
LOOK_SECONDS = 15.0  # age of the collections' figures in the metrics before the store is asked again
LOOK_SHARE = 0.05  # largest share of time spent asking the store: counting a large collection takes seconds
LOOK_WAIT = 1.0  # seconds that a scrape waits for the store
ANSWER_SECONDS = 10.0  # a store that takes longer counts as not answering, until it does
_COUNTS = ("rows", "chunks", "empty", "quarantined")
_KEYS = [item.name for item in fields(CollectionStatus) if item.name != "checkpoint"]


def version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def ages(status: CollectionStatus, now: datetime | None = None) -> tuple[float | None, float | None, float | None]:
    """Return seconds since the last complete sync, the same plus the lag of its watermark behind the source, and
    seconds since the last complete comparison began; None: unknown. Uses this machine's clock."""
    now, checkpoint = now or datetime.now(UTC), status.checkpoint
    last, full = status.last_sync, checkpoint.last_full
    age = None if last is None else max(0.0, (now - last).total_seconds())
    lag = None if age is None else age + behind(checkpoint.mark)
    return age, lag, None if full is None else max(0.0, (now - full).total_seconds())


class StoreLook:
    """The last known state of a store's collections, for scrapes that must not wait for a store that hangs.
    Thread-safe. Starting with the first scrape, one thread at a time asks the store."""

    def __init__(
        self,
        names: Sequence[str],
        store: Callable[[], AbstractContextManager[VectorStore | None]],
        clock: Callable[[], float] = time.monotonic,
        jobs: Callable[[], Iterator[Sample]] | None = None,
    ) -> None:
        """`jobs`: figures of job records that are in the store too."""
        self._names = names
        self._store = store
        self._clock = clock
        self._jobs = jobs
        self.job_samples: list[Sample] = []
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._done.set()
        self._begun, self._took = -math.inf, 0.0
        self._known: dict[str, CollectionStatus | None] = {}
        self._known_at: float | None = None
        self._answers: float | None = None
        self._due = bool(names)

    def forget(self) -> None:
        """Ask the store at the next call, after a write."""
        self._due = True

    def statuses(self, wait: float = LOOK_WAIT) -> dict[str, CollectionStatus | None]:
        """Return the last known statuses. None: never synced; {}: the store has not answered yet. At most LOOK_SECONDS
        old if the store answers within `wait`."""
        with self._lock:
            now = self._clock()
            rest = max(LOOK_SECONDS, self._took / LOOK_SHARE)
            if self._names and self._done.is_set() and (self._due or now - self._begun >= rest):
                done = threading.Event()
                threading.Thread(target=self._run, args=(done,), name="owl-sap-store-look", daemon=True).start()
                self._due, self._begun, self._done = False, now, done
            done, left = self._done, self._begun + wait - now
        done.wait(max(0.0, left))
        with self._lock:
            return dict(self._known)

    def health(self) -> dict[str, float | None]:
        """Return `answers` (1: the last attempt succeeded, 0: it failed or hangs) and `look_age`, the seconds since
        the last success. None: not known yet."""
        with self._lock:
            now = self._clock()
            hangs = not self._done.is_set() and now - self._begun > ANSWER_SECONDS
            return {
                "answers": 0.0 if hangs else self._answers,
                "look_age": None if self._known_at is None else now - self._known_at,
            }

    def close(self) -> None:
        """Start no more attempts; wait a second for one in progress, because its connections are closed next."""
        with self._lock:
            self._names, done = (), self._done
        done.wait(1.0)

    def _run(self, done: threading.Event) -> None:
        found = None
        with suppress(Exception), self._store() as store:  # readiness and doctor report the error
            found = {name: None if store is None else store.status(name) for name in self._names}
            self.job_samples = [] if self._jobs is None else list(self._jobs())
        with self._lock:
            now = self._clock()
            self._answers, self._took = float(found is not None), now - self._begun
            if found is not None:
                self._known, self._known_at = found, now
            done.set()


class Status:
    """Thread-safe."""

    def __init__(self, parts: Parts, collections: Collections, background: Background, metrics: Metrics) -> None:
        self._parts = parts
        self._collections = collections
        self._background = background
        self._jobs_in_store = parts.settings.state.records == "store"
        self._look = StoreLook(
            collections.names, parts.store_to_read, jobs=self._job_samples if self._jobs_in_store else None
        )
        collections.on_change = self._look.forget
        metrics.expect(collections.synced_names)
        collections.on_new.append(lambda block: None if block.documents else metrics.expect([block.name]))
        embedding = parts.settings.embedding

        def wanted_but_missing() -> float:
            engine = parts.engine_if_loaded()
            if engine is not None and embedding.expect_gpu:  # answers at once, even if the driver hangs
                return float(engine.profile.kind != "cuda")
            return float(gpu_missing(embedding, engine) is not None)

        metrics.gpu_missing.set_function(wanted_but_missing)
        metrics.sources |= {
            "engines": self._engine_samples,
            "collections": self._collection_samples,
            "gpu": lambda: gpu_samples(self.gpu()),
        }

    def close(self) -> None:
        self._look.close()

    def collections(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return one entry per collection; one that was never synced has 0 rows and no table. Raises UnknownCollection,
        and UnknownTable when the store's schema does not exist."""
        entries, store = [], self._parts.settings.store
        self._collections.refresh()
        for name in self._collections.names if names is None else names:
            spec, status = self._collections.spec(name), self._collections.stored(name)
            shown: dict[str, Any] = dict.fromkeys((*_KEYS, "lag_seconds", "method", "last_full"))
            if status is None:
                shown |= dict.fromkeys((*_COUNTS, "generation", "foreign"), 0)
                shown |= {"collection": name, "store": store.kind}
                if store.kind == "hana":
                    shown["schema"] = self._parts.settings.store_schema
                if spec.written_by_clients:
                    shown["method"] = WRITTEN["method"]
            else:
                last, full, lag = status.last_sync, status.checkpoint.last_full, ages(status)[1]
                shown |= {key: getattr(status, key) for key in _KEYS} | {
                    "last_sync": None if last is None else last.isoformat(),
                    "lag_seconds": None if lag is None else round(lag, 1),
                    "method": (status.checkpoint.mark or {}).get("method", "full"),
                    "last_full": None if full is None else full.isoformat(),
                }
            model = self._parts.engine_if_loaded(name) or PACKAGED.get(self._parts.configured(name).name)
            shown["model_languages"] = list(model.languages) if model else []
            shown["model_licence"] = model.licence if model else ""
            entries.append(shown | self._background.shown(name, status))
        return entries

    def info(self) -> dict[str, Any]:
        """Return the answer of `/v1/info`. Loads the engine. `models`: the models that collections name for themselves,
        each once. One that is not loaded has only a name; for a folder, that is the last part of the path."""
        settings, engine = self._parts.settings, self._parts.engine
        owners: dict[str, list[str]] = {}
        for each in settings.collections:
            if each.model is not None and each.model != settings.embedding.model:
                owners.setdefault(each.model, []).append(each.name)
        models = []
        for model, names in owners.items():
            is_hub = model.count("/") < 2 and not model.startswith(("/", ".", "~"))  # owner and model
            own = self._parts.engine_if_loaded(names[0])
            unloaded = dict.fromkeys((*_OF_ENGINE[1:], "device", "devices"))
            models.append(
                {"model": model if is_hub else Path(model).name, "collections": names, "loaded": own is not None}
                | (unloaded if own is None else _engine(own))
            )
        from app.src.observe.checks import choices

        limits = ("max_body_bytes", "max_inputs", "max_text_chars", "max_k")
        return {
            "version": version(),
            **_engine(engine),
            "models": models,
            "settings": [asdict(each) for each in choices(engine)],
            "store": settings.store.kind,
            "collections": self._collections.names,
            "limits": {name: getattr(settings.api, name) for name in limits},
        }

    def gpu(self) -> dict[str, Any]:
        """Return what NVIDIA's driver reports now, within GPU_WITHIN. Loads no engine."""
        return asdict(snapshot_within(GPU_WITHIN))

    # -------------------------------------------------------------------------------------------------------- metrics

    def _engine_samples(self) -> Iterator[Sample]:
        """Yield the engines' samples. Engines that differ only in the revision of the model are summed."""
        sums: dict[tuple[str, ...], dict[str, float]] = {}
        for engine in self._parts.engines_loaded:
            shown = ((engine.model, each.precision, each.path, each.profile.name) for each in engine.members)
            for device in dict.fromkeys(shown):  # two cards may have one name
                yield "owl_sap_engine_info", device, 1.0
            into = sums.setdefault((engine.model, engine.precision), {})
            gauges = {"token_budget": engine.token_budget, "planned_tokens": engine.planned_tokens}
            gauges["failed_devices"] = sum(map(bool, engine.failures))
            for name, value in (asdict(engine.stats()) | gauges).items():
                into[name] = into.get(name, 0.0) + value
        for labels, found in sums.items():
            yield "owl_sap_engine_token_budget", labels, found.pop("token_budget")
            yield "owl_sap_engine_planned_tokens", labels, found.pop("planned_tokens")
            yield "owl_sap_engine_failed_devices", labels, found.pop("failed_devices")
            found["recomputed_rows"] = found.pop("recomputed")
            for name, value in found.items():
                yield f"owl_sap_engine_{name}_total", labels, value

    def _collection_samples(self) -> Iterator[Sample]:
        statuses, now = self._look.statuses(), datetime.now(UTC)
        for name, status in statuses.items():
            shown = dict.fromkeys(_COUNTS, 0.0) if status is None else {key: getattr(status, key) for key in _COUNTS}
            age, lag, full_age = (None, None, None) if status is None else ages(status, now)
            shown["empty_rows"], shown["quarantined_rows"] = shown.pop("empty"), shown.pop("quarantined")
            shown |= {"sync_lag_seconds": lag, "checkpoint_age_seconds": age, "full_comparison_age_seconds": full_age}
            for metric, value in shown.items():
                yield f"owl_sap_{metric}", (name,), value
        health = self._look.health()
        yield "owl_sap_store_answers", (), health["answers"]
        yield "owl_sap_store_look_age_seconds", (), health["look_age"]
        yield from self._look.job_samples if self._jobs_in_store else self._job_samples()

    def _job_samples(self) -> Iterator[Sample]:
        waited = 0.0
        with suppress(StateUnusable):
            counts, oldest, progress = self._background.jobs.tally()
            waited = waited if oldest is None else max(waited, time.time() - oldest)
            for labels, count in counts.items():
                yield "owl_sap_jobs", labels, count
            for labels, (done, total) in progress.items():
                yield "owl_sap_job_rows_done", labels, done
                yield "owl_sap_job_rows", labels, total
            for name in self._collections.names:
                # A collection without a turn: no process runs schedules with these job records.
                if self._background.jobs.turn(name) is not None:
                    start = self._background.scheduler.next_start(name)
                    overdue = None if start is None else max(0.0, time.time() - start)
                    yield "owl_sap_sync_overdue_seconds", (name,), overdue
        yield "owl_sap_jobs_oldest_queued_seconds", (), waited


_OF_ENGINE = ("model", "dimension", "max_tokens", "languages", "licence", "fingerprint")


def _engine(engine: Engine) -> dict[str, Any]:
    chosen = ("precision", "precision_reason", "path", "path_reason")
    devices = [
        {"kind": member.profile.kind, "name": member.profile.name}
        | {key: getattr(member, key) for key in chosen}
        | {"failed": failure}
        for member, failure in zip(engine.members, engine.failures, strict=True)
    ]
    return {
        **{key: getattr(engine, key) for key in _OF_ENGINE},
        "languages": list(engine.languages),
        "device": devices[0],
        "devices": devices,
    }

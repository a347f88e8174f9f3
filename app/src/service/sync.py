"""Sync collections with their tables: sync, build another generation, plan, verify, quarantine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from app.src.core.backends import DeviceFailed
from app.src.observe.metrics import Metrics
from app.src.service.collections import Collections
from app.src.service.generations import Generations, Maker
from app.src.service.languages import KnownLanguages, advice_on_rows, note_on_rows
from app.src.service.wiring import Parts
from app.src.settings import Settings
from connector.discovery.languages import SAMPLE, of_rows
from connector.discovery.text_views import language_of
from connector.document.document import parse_id
from connector.errors import ConfigurationError, ConnectorError, GenerationRefused, LeaseLost, TextsNotEmbeddable
from connector.model import CollectionSpec, ModelSource, Recipe
from connector.protocols import Observer
from connector.stores.records import FOREIGN, ModelStamp
from connector.sync import quarantine
from connector.sync.generations import active, building_for, filled_by_sync, is_of, needs_another
from connector.sync.plan import Plan, PlanOptions, plan
from connector.sync.quarantine import Entry, GivenKey, RetryReport
from connector.sync.ranges import Workers
from connector.sync.run import Ends, Stop, SyncOptions, SyncReport, Watch, never, sync
from connector.sync.verify import VerifyReport, verify

Report = TypeVar("Report", bound=SyncReport)
_ACCOUNTED = ("upserted", "unchanged", "empty", "quarantined", "superseded", "deleted")
_BEFORE_WRITING = ("schema_changed", "log_missing")  # reasons for a pause before anything is written


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """Options of one sync; None: as configured. `retry_login`: allow one more attempt after a refused login."""

    full: bool = False
    max_deletes: float | None = None
    owner: str = "sync"
    retry_login: bool = False
    accept_schema: bool = False


@dataclass(slots=True)
class BuildReport(SyncReport):
    """The report of a generation being built. `serving`: the report of the active generation's sync."""

    generation: int = 0
    serving: SyncReport | None = None


_Run = tuple[SyncOptions, Watch]


def run_options(settings: Settings, owner: str, **more: Any) -> SyncOptions:
    """Return the configured options of a run, overridden by `more`."""
    names = ("page_rows", "max_deletes", "lease_wait", "window", "max_attempts", "readers", "rows_stay")
    return SyncOptions(owner=owner, **{name: getattr(settings.sync, name) for name in names} | more)


class Sync:
    """Thread-safe. Raises the errors of the connector and of the engine, UnknownCollection, and WrongOrigin for a
    collection without a source table."""

    def __init__(self, parts: Parts, collections: Collections, generations: Generations, metrics: Metrics) -> None:
        self._parts = parts
        self._collections = collections
        self._generations = generations
        self._metrics = metrics
        self._judged: set[str] = set()  # collections whose languages were compared with their model's

    def run(
        self, name: str, request: SyncRequest | None = None, observer: Observer | None = None, stop: Stop = never
    ) -> SyncReport:
        """Sync the collection. If the settings name another model, or a build is unfinished: sync the active generation
        by its own recipe, and build or continue the other one. Once per process, a note warns of rows in a language
        that the model does not know."""
        report = self._counted(self._sync, name, self._run_of(request, observer, stop))
        if report.upserted and not isinstance(report, BuildReport) and name not in self._judged:
            with suppress(ConnectorError):  # the rows are stored
                report.notes += self._note_on_languages(name)
                self._judged.add(name)
        return report

    def _note_on_languages(self, name: str) -> list[str]:
        known = KnownLanguages.of_loaded(self._parts.embedder_for(name))
        stored = self._parts.store.status(name) if known.codes else None
        if stored is None:
            return []
        chosen = self._parts.store.view(name, stored.generation, None).sample(SAMPLE).chosen
        column, keys = language_of(self._parts.source.describe(self._collections.spec(name).source)), []
        if column is not None and column.name in stored.key:
            place = stored.key.index(column.name)
            keys = [None if each.id.startswith(FOREIGN) else parse_id(each.id)[place] for each in chosen]
        return note_on_rows(name, of_rows([each.text for each in chosen], keys), len(chosen), known)

    def build(
        self,
        name: str,
        request: SyncRequest | None = None,
        observer: Observer | None = None,
        stop: Stop = never,
        model: ModelSource | None = None,
    ) -> BuildReport:
        """As `run`, but build a new generation beside the active one even if nothing changed. `model`: instead of the
        configured one. Raises UnknownCollection before the first sync."""
        run = self._run_of(request, observer, stop)
        return self._counted(lambda spec, run: self._build(spec, run, model), name, run)

    def _run_of(self, request: SyncRequest | None, observer: Observer | None, stop: Stop) -> _Run:
        request = request or SyncRequest()
        more: dict[str, Any] = {"full": request.full, "accept_schema": request.accept_schema}
        if request.max_deletes is not None:
            more["max_deletes"] = request.max_deletes
        if self._parts.scaled:
            more["windows"] = self._parts.settings.scale.windows
        return run_options(self._parts.settings, request.owner, **more), Watch(observer, stop)

    def _counted(self, work: Callable[[CollectionSpec, _Run], Report], name: str, run: _Run) -> Report:
        spec = self._collections.spec_of_table(name)
        metrics = self._metrics
        try:
            report = work(spec, run)
        except Exception as error:
            metrics.syncs.labels(name, "failed").inc()
            metrics.count_error(error)
            raise
        self._collections.changed(name)
        outcome = "paused" if report.paused else "stopped" if report.stopped else "succeeded"
        metrics.syncs.labels(name, outcome).inc()
        kept_up = report.serving if isinstance(report, BuildReport) else None
        for each in (report, kept_up):  # both runs embed texts; their rows are the same
            metrics.embedded_texts.inc(each.embedded_texts if each else 0)
        for outcome in _ACCOUNTED:
            metrics.rows_synced.labels(name, outcome).inc(getattr(report, outcome))
        for stage, seconds in report.stages.items():
            metrics.stage_seconds.labels(name, stage).inc(seconds)
        return report

    # ------------------------------------------------------------------------------------------------- generations

    def _sync(self, spec: CollectionSpec, run: _Run) -> SyncReport:
        store, stamp = self._parts.store, ModelStamp.of(self._parts.embedder_for(spec.name))
        found = store.generations.all(spec.name, counted=False)
        if building_for(found, stamp) is not None or needs_another(store, spec.name, found, stamp):
            report: SyncReport = self._build(spec, run)
        else:
            serving = active(found)
            number = serving.number if serving is not None and is_of(serving, stamp) else None
            report = self._fill(self._generations.configured(spec, number), run)
        left = [each.number for each in found if each.state == "building" and not is_of(each, stamp)]
        if left:
            report.notes.append(
                f"generation {', '.join(map(str, left))} was not switched to and is not of the configured model, so "
                f"it was not continued; owl-sap generations {spec.name} --drop {left[0]} deletes it"
            )
        return report

    def _build(self, spec: CollectionSpec, run: _Run, model: ModelSource | None = None) -> BuildReport:
        """Sync the active generation by its own recipe, and build or continue another one by the settings, or with
        `model`."""
        store, generations = self._parts.store, self._generations
        maker = generations.configured(spec) if model is None else Maker(spec, self._parts.embedder_of(model))
        # Begin the new generation first, so that the active one keeps its recipe even if the settings fit its model.
        beside = store.generations.begin(spec.name, maker.embedder, Recipe(spec, maker.embedder.source))
        number = int(beside.rpartition("@")[2])
        serving: SyncReport | None = None
        notes = []
        if not store.generations.has_configured_type(spec.name, number):
            notes.append(
                f"generation {number} was begun with another [store] vector_type and keeps it; for the configured one: "
                f"owl-sap generations {spec.name} --drop {number}, then --build"
            )
        try:  # a missing model must not prevent its replacement
            serving = self._fill(generations.maker(spec), run)
        except DeviceFailed:
            raise
        except self._own_errors(LeaseLost) as error:
            notes.append(f"the active generation was not updated: {error}")
        full = replace(run[0], full=True), run[1]
        built = self._fill(replace(maker, spec=replace(spec, name=beside), number=number), full)
        report = BuildReport(**{item.name: getattr(built, item.name) for item in fields(SyncReport)})
        report.collection, report.generation, report.serving = spec.name, number, serving
        report.notes += notes
        if report.stopped or report.paused:
            report.notes.append(f"generation {number} is not complete; the next sync continues it")
        elif self._collections.block(spec.name).switch == "auto":
            report.notes.append(self._switch_if_proved(spec, number, run))
        else:
            report.notes.append(
                f"generation {number} is built but not active yet: owl-sap generations {spec.name} "
                "--compare, then --switch"
            )
        return report

    def _own_errors(self, *more: type[Exception]) -> tuple[type[Exception], ...]:
        """Return the classes of errors in one generation's recipe or model, which do not affect other generations."""
        of_engine = (kind for kind in self._parts.expected_errors if not issubclass(kind, ConnectorError))
        return (ConfigurationError, *more, *of_engine)

    def _fill(self, maker: Maker, run: _Run) -> SyncReport:
        ends = Ends(self._parts.source, self._parts.store, maker.embedder)
        options, watch = run
        before = maker.embedder.engine.stats()
        report = sync(maker.spec, ends, options, watch.observer, watch.stop, self._workers(maker))
        after = maker.embedder.engine.stats()
        report.blocks = after.blocks - before.blocks
        report.repeated_blocks = after.repeated_blocks - before.repeated_blocks
        if report.paused not in _BEFORE_WRITING:
            self._generations.record(maker)
        return report

    def _workers(self, maker: Maker) -> Workers | None:
        """Return the workers that share the key ranges of a sync."""
        parts = self._parts
        if not (parts.scaled and parts.settings.scale.ranges and parts.store_in_hana):
            return None
        if maker.embedder.database_model is not None:  # of an older generation: HANA embeds, no worker has the model
            return None
        from app.src.service.ranges import RangeWorkers

        return RangeWorkers(maker.embedder.engine.members, self._collections.file)

    def _switch_if_proved(self, spec: CollectionSpec, number: int, run: _Run) -> str:
        """Switch to the generation if it passes verify and can be compared. Return what was done, or why not."""
        try:
            if not self._verify(spec, number, run, repair=False).ok:
                return f"generation {number} is built, but verify found drift or was stopped: not switched"
            comparison = self._generations.compare(spec.name, number)
            if comparison.overlap_at_10 is None:
                return f"generation {number} is built, but nothing is there to compare it with: not switched"
            switched = self._generations.switch(spec.name, number)
        except DeviceFailed:  # the next attempt continues here
            raise
        except self._own_errors(GenerationRefused, TextsNotEmbeddable, LeaseLost) as error:
            return f"generation {number} is built, but was not switched to: {error}"
        return (
            f"generation {number} is active now instead of {switched.retired}; overlap@10 "
            f"{comparison.overlap_at_10:.2f} over {comparison.queries} queries"
        )

    # ------------------------------------------------------------------------------------------------- plan, verify

    def plan(self, name: str, *, samples: int = 5, estimate: bool = True, observer: Observer | None = None) -> Plan:
        """Return what a sync would do, without writing. Raises as a sync would before it writes."""
        spec, settings = self._collections.spec_of_table(name), self._parts.settings
        run = settings.sync
        options = PlanOptions(run.page_rows, run.max_deletes, samples=samples, rows_stay=run.rows_stay)
        options = options if estimate else replace(options, measure_seconds=None)
        self._parts.check_schema()
        embedder = self._parts.embedder_for(name)
        with self._parts.store_to_read() as store:
            filled, compared = spec, store
            if store is not None:
                filled, compared = filled_by_sync(store, Recipe(spec, embedder.source), embedder)
            planned = plan(filled, self._parts.source, compared, embedder, options, observer)
        planned.collection = name
        if filled.name != name or compared is not store:
            planned.notes.append(
                "a sync builds a generation beside the active one, by the model and the recipe of the settings; "
                f"this is what it would put there. owl-sap generations {name} --switch then makes it active"
            )
        known = KnownLanguages.of_loaded(embedder)
        if advice := advice_on_rows(planned.languages, planned.sampled, known):
            planned.model = advice[1]
            planned.notes += note_on_rows(name, planned.languages, planned.sampled, known)
        return planned

    def verify(
        self,
        name: str,
        *,
        repair: bool = False,
        generation: int | None = None,
        observer: Observer | None = None,
        stop: Stop = never,
    ) -> VerifyReport:
        """Compare the active generation, or `generation`, with the source, using its own recipe and model."""
        run = run_options(self._parts.settings, "verify"), Watch(observer, stop)
        report = self._verify(self._collections.spec_of_table(name), generation, run, repair=repair)
        if repair:
            self._collections.changed(name)
        return report

    def _verify(self, spec: CollectionSpec, generation: int | None, run: _Run, *, repair: bool) -> VerifyReport:
        maker = self._generations.maker(spec, generation)
        ends = Ends(self._parts.source, self._parts.store, maker.embedder)
        report = verify(maker.spec, ends, repair=repair, options=run[0], watch=run[1])
        if repair and report.ok:  # the rows are now those of this recipe
            self._generations.record(maker)
        return report


class Quarantine:
    """Thread-safe. `wanted`: keys; None: all entries. Raises UnknownCollection, and UnknownKey for a key without an
    entry."""

    def __init__(self, parts: Parts, collections: Collections, generations: Generations) -> None:
        self._parts = parts
        self._collections = collections
        self._generations = generations

    def entries(self, name: str, wanted: Sequence[GivenKey] | None = None) -> list[Entry]:
        """Return the entries in the order of their keys."""
        self._collections.spec(name)
        stored = self._collections.stored(name)
        rows = [] if stored is None else self._parts.store.quarantine(name)
        columns = self._collections.key_columns(name, stored) if rows else ()
        attempts = self._parts.settings.sync.max_attempts
        return quarantine.chosen([quarantine.entry(row, columns, attempts) for row in rows], wanted)

    def ids(self, name: str, wanted: Sequence[GivenKey] | None) -> list[str] | None:
        """Return the ids of the wanted entries. Return None, which means all, for None."""
        return None if wanted is None else [entry.id for entry in self.entries(name, wanted)]

    def retry(
        self, name: str, ids: list[str] | None = None, observer: Observer | None = None, stop: Stop = never
    ) -> RetryReport:
        """Sync the rows with these ids again (None: all). Raises as a sync."""
        maker = self._generations.maker(self._collections.spec_of_table(name))
        ends = Ends(self._parts.source, self._parts.store, maker.embedder)
        options = run_options(self._parts.settings, "retry")
        report = quarantine.retry(maker.spec, ends, ids, options, Watch(observer, stop))
        self._collections.changed(name)
        return report

    def drop(self, name: str, wanted: Sequence[GivenKey] | None = None, **options: float) -> int:
        """Delete entries and return how many; the next sync tries the rows again. `options`: see `run_options`. Raises
        LeaseLost when another worker holds the collection longer than `lease_wait`."""
        ids = [entry.id for entry in self.entries(name, wanted)]
        if not ids:
            return 0
        dropped = quarantine.drop(self._parts.store, name, ids, run_options(self._parts.settings, "drop", **options))
        self._collections.changed(name)
        return dropped

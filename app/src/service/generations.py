"""Change of model or template without downtime, as every surface offers it: syncs what serves and what is built beside
it, compares, switches, drops. Knows the parts, no HTTP and no terminal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from app.src.service.wiring import EngineEmbedder, Parts
from connector.errors import (
    ConfigurationError,
    ConnectorError,
    GenerationRefused,
    LeaseLost,
    ModelMismatch,
    TextsNotEmbeddable,
)
from connector.model import CollectionSpec, CollectionStatus, Generation, ModelSource, Recipe
from connector.protocols import Observer
from connector.stores.records import ModelStamp
from connector.sync.generations import (
    Comparison,
    Side,
    active,
    building_for,
    chosen,
    compare,
    is_of,
    last_retired,
    needs_another,
    sample_texts,
)
from connector.sync.run import Ends, Stop, SyncOptions, SyncReport, Watch, sync
from connector.sync.verify import VerifyReport, verify

if TYPE_CHECKING:
    from app.src.settings import CollectionSettings

_BEFORE_WRITING = ("schema_changed", "log_missing")
"""Reasons of a pause that leave what is stored as it was made."""
QUERIES = 50
"""Stored texts that a comparison asks for, unless it is told otherwise."""


@dataclass(slots=True)
class BuildReport(SyncReport):
    """The report of a generation that is being built. `serving`: of the run that kept up the one that serves."""

    generation: int = 0
    serving: SyncReport | None = None


@dataclass(frozen=True, slots=True)
class Switched:
    """`retired` served until now."""

    collection: str
    generation: int
    retired: int
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Maker:
    """What fills a generation: `spec` under its name in the store, and its model."""

    spec: CollectionSpec
    embedder: EngineEmbedder
    source: ModelSource
    number: int | None = None
    """None: not stored yet."""


@dataclass(frozen=True, slots=True)
class Working:
    """How to run: who looks on, and who may end it early."""

    options: SyncOptions
    observer: Observer | None
    stop: Stop


class Generations:
    """Thread-safe. `settings_of`: the block of a collection."""

    def __init__(self, parts: Parts, settings_of: Callable[[str], CollectionSettings]) -> None:
        self._parts = parts
        self._settings_of = settings_of

    # ---------------------------------------------------------------------------------------------------- looking

    def all(self, name: str, counted: bool = True) -> list[Generation]:
        """By number; [] when it was never synced. Raises UnknownTable for a schema that is not there."""
        found = self._parts.store.generations.all(name, counted)
        if not found:
            self._parts.check_schema()
        return found

    def maker(self, spec: CollectionSpec, number: int | None = None) -> Maker:
        """What fills generation `number`; None: the one that serves. That is what the settings say, unless they are
        about another one already. Raises ModelMismatch when its model cannot be had, UnknownGeneration."""
        found = self._parts.store.generations.all(spec.name, counted=False)
        if number is not None:
            return self._maker_of(spec, chosen(spec.name, found, number))
        serving, stamp = active(found), ModelStamp.of(self._parts.embedder_for(spec.name))
        if serving is None:
            return self._configured(spec)
        if is_of(serving, stamp) and building_for(found, stamp) is None:
            return self._configured(spec, serving.number)
        if spec.written_by_clients and not needs_another(self._parts.store, spec.name, found, stamp):
            return self._configured(spec)  # it is empty: no sync will ever come that would give it the other model
        return self._maker_of(spec, serving)

    def _configured(self, spec: CollectionSpec, number: int | None = None) -> Maker:
        return Maker(spec, self._parts.embedder_for(spec.name), self._parts.model_source_for(spec.name), number)

    def _maker_of(self, spec: CollectionSpec, generation: Generation) -> Maker:
        embedder, source = self._model_of(spec.name, generation)
        made_by = generation.recipe
        if made_by is not None:
            was = made_by.spec
            spec = replace(
                spec,
                source=was.source,
                template=was.template,
                key=was.key,
                where=was.where,
                metadata=was.metadata,
                chunk=was.chunk,
            )
        return Maker(replace(spec, name=generation.name), embedder, source, generation.number)

    def query_embedder(self, stored: CollectionStatus) -> EngineEmbedder:
        """The model for queries to what serves. Raises ModelMismatch when it cannot be had."""
        for generation in self._parts.store.generations.all(stored.collection, counted=False):
            if generation.number == stored.generation:
                return self._model_of(stored.collection, generation)[0]
        return self._parts.embedder_for(stored.collection)  # switched away from and dropped: the search will find out

    def _model_of(self, name: str, generation: Generation) -> tuple[EngineEmbedder, ModelSource]:
        """By what is recorded of it; an earlier version recorded no more than its name, which may do."""
        wanted = self._parts.settings.embedding_of(name)
        recipe = generation.recipe
        recorded = ModelSource(re.sub("@[0-9a-f]{8}$", "", generation.model)) if recipe is None else recipe.model
        reasons = []
        ours = (recorded.name, recorded.revision) == (wanted.model, wanted.revision)
        for source in (None,) if ours else (recorded, None):
            try:
                embedder = self._parts.embedder_for(name) if source is None else self._parts.embedder_of(source)
            except self._parts.expected_errors as error:
                if source is None and not ours:
                    continue  # the configured model's trouble is not this generation's
                reasons.append(str(error))
                continue
            if is_of(generation, ModelStamp.of(embedder)):
                return embedder, source or self._parts.model_source_for(name)
            reasons.append(f"the model {embedder.model} that is there now gives other vectors")
        another = f"build another: owl-sap sync {name}, then owl-sap generations {name} --switch"
        if self._settings_of(name).documents:
            another = (
                "write the documents to another collection, or delete all of them here and write them again: an empty "
                "collection takes the model that the settings name"
            )
        raise ModelMismatch(
            f"generation {generation.number} of {name!r} was made with {generation.model} ({generation.dimension} "
            f"numbers a vector), and that model cannot be had: {'; '.join(reasons)}. Bring it back, search by words "
            f"(mode keyword), or {another}"
        )

    # ---------------------------------------------------------------------------------------------------- syncing

    def sync(self, spec: CollectionSpec, working: Working) -> SyncReport:
        """What serves, where that is what the settings describe. Where they name another model, or where another
        generation is being built, what serves is kept up by its own recipe, and the other one is built on."""
        store, stamp = self._parts.store, ModelStamp.of(self._parts.embedder_for(spec.name))
        found = store.generations.all(spec.name, counted=False)
        if building_for(found, stamp) is not None or needs_another(store, spec.name, found, stamp):
            report: SyncReport = self.build(spec, working)
        else:
            serving = active(found)
            number = serving.number if serving is not None and is_of(serving, stamp) else None
            report = self._run(self._configured(spec, number), working)
        left = [each.number for each in found if each.state == "building" and not is_of(each, stamp)]
        if left:
            numbers = ", ".join(map(str, left))
            report.notes.append(
                f"generation {numbers} is unfinished and not of the configured model, so it was left as it is; "
                f"owl-sap generations {spec.name} --drop {left[0]} deletes it"
            )
        return report

    def build(self, spec: CollectionSpec, working: Working, model: ModelSource | None = None) -> BuildReport:
        """Keep up what serves, by its own recipe, and build another generation as the settings say beside it (with
        `model`: by another model than they name), going on with an unfinished one. Raises UnknownCollection before a
        first sync."""
        store = self._parts.store
        maker = self._configured(spec) if model is None else Maker(spec, self._parts.embedder_of(model), model)
        before = active(store.generations.all(spec.name, counted=False))
        # First of all: with one beside it, what serves keeps its own recipe even if the settings are for its model.
        beside = store.generations.begin(spec.name, maker.embedder, Recipe(spec, maker.source))
        number = int(beside.rpartition("@")[2])
        serving, notes = self._keep_up(spec, working)
        if before is not None and before.recipe is None:
            notes.append("no sync had recorded how what serves is made, so it was kept up as the settings say now")
        full = replace(working, options=replace(working.options, full=True))
        built = self._run(replace(maker, spec=replace(spec, name=beside), number=number), full)
        report = BuildReport(**{item.name: getattr(built, item.name) for item in fields(SyncReport)})
        report.collection, report.generation, report.serving = spec.name, number, serving
        report.notes += notes
        if report.stopped or report.paused:
            report.notes.append(f"generation {report.generation} is not complete; the next sync continues it")
        elif self._settings_of(spec.name).switch == "auto":
            report.notes.append(self._switch_by_itself(spec, report.generation, working))
        else:
            report.notes.append(
                f"generation {report.generation} is built but not active yet: owl-sap generations {spec.name} "
                "--compare, then --switch"
            )
        return report

    def _keep_up(self, spec: CollectionSpec, working: Working) -> tuple[SyncReport | None, list[str]]:
        """As far as possible: what it was made with may be gone, and that must not hold up what replaces it."""
        try:
            return self._run(self.maker(spec), working), []
        except self._hindrances(LeaseLost) as error:
            return None, [f"the active generation was not updated: {error}"]

    def _hindrances(self, *more: type[Exception]) -> tuple[type[Exception], ...]:
        """Errors of one generation's recipe or model, which say nothing about another."""
        of_engine = (kind for kind in self._parts.expected_errors if not issubclass(kind, ConnectorError))
        return (ConfigurationError, *more, *of_engine)

    def _run(self, maker: Maker, working: Working) -> SyncReport:
        ends = Ends(self._parts.source, self._parts.store, maker.embedder)
        report = sync(maker.spec, ends, working.options, working.observer, working.stop)
        if report.paused not in _BEFORE_WRITING:
            self.record(maker)
        return report

    def record(self, maker: Maker) -> None:
        """What the generation that `maker` has filled is made by."""
        store, name = self._parts.store, maker.spec.name.partition("@")[0]
        number = maker.number
        if number is None and (stored := active(store.generations.all(name, counted=False))) is not None:
            number = stored.number
        if number is not None:
            store.generations.record(name, number, Recipe(replace(maker.spec, name=name), maker.source))

    def _switch_by_itself(self, spec: CollectionSpec, number: int, working: Working) -> str:
        """Only what is proved and can be compared; says what was done or why not."""
        try:
            verified = self.verify(spec, number, repair=False, working=working)
            if not verified.ok:
                return f"generation {number} is built, but verify found drift or was stopped: not switched"
            comparison = self.compare(spec, number)
            if comparison.overlap_at_10 is None:
                return f"generation {number} is built, but nothing is there to compare it with: not switched"
            switched = self.switch(spec, number)
        except self._hindrances(GenerationRefused, TextsNotEmbeddable, LeaseLost) as error:
            return f"generation {number} is built, but was not switched to: {error}"
        return (
            f"generation {number} is active now instead of {switched.retired}; overlap@10 "
            f"{comparison.overlap_at_10:.2f} over {comparison.queries} queries"
        )

    def verify(self, spec: CollectionSpec, number: int | None, *, repair: bool, working: Working) -> VerifyReport:
        """Each generation is proved by its own recipe and model."""
        maker = self.maker(spec, number)
        ends = Ends(self._parts.source, self._parts.store, maker.embedder)
        watch = Watch(working.observer, working.stop)
        return verify(maker.spec, ends, repair=repair, options=working.options, watch=watch)

    # -------------------------------------------------------------------------------------------------- switching

    def compare(
        self, spec: CollectionSpec, number: int | None = None, queries: Sequence[str] = (), sample: int = QUERIES
    ) -> Comparison:
        """What serves with generation `number` (None: the newest that is being built), by `queries` and `sample` stored
        texts. Raises ModelMismatch, UnknownGeneration, GenerationRefused."""
        found = self.all(spec.name)
        other, serving = chosen(spec.name, found, number), active(found)
        if serving is None or other.number == serving.number:
            raise GenerationRefused(
                f"generation {other.number} of {spec.name!r} is active: name another to compare it with"
            )
        texts = [*queries, *sample_texts(self._parts.store, serving.name, sample)]
        sides = [Side(each, self._model_of(spec.name, each)[0]) for each in (serving, other)]
        return compare(self._parts.store, spec.name, sides[0], sides[1], texts)

    def switch(self, spec: CollectionSpec, number: int | None = None, *, force: bool = False) -> Switched:
        """Let generation `number` (None: the newest that is being built) serve. Raises UnknownGeneration, and
        GenerationRefused for one that no sync has completed, unless `force`."""
        found = self.all(spec.name, counted=False)
        target = chosen(spec.name, found, number)
        if not target.complete and not force and target.state != "active":
            raise GenerationRefused(
                f"generation {target.number} of {spec.name!r} is not complete, because no sync has finished. "
                f"Run: owl-sap sync {spec.name}; --force switches to it as it is"
            )
        return self._switch(spec.name, found, target)

    def rollback(self, spec: CollectionSpec) -> Switched:
        """Let the generation serve again that did before. Raises GenerationRefused when there is none."""
        found = self.all(spec.name, counted=False)
        target = last_retired(found)
        if target is None:
            raise GenerationRefused(f"{spec.name!r} has no earlier generation to roll back to")
        return self._switch(spec.name, found, target)

    def _switch(self, name: str, found: Sequence[Generation], target: Generation) -> Switched:
        serving = active(found)
        if serving is None or serving.number == target.number:
            raise GenerationRefused(f"generation {target.number} of {name!r} is already active")
        status = self._parts.store.status(name)
        self._parts.store.generations.switch(name, target.number)
        notes = []
        if status is not None and status.foreign:
            notes.append(
                f"{status.foreign} records that others wrote stay in generation {serving.number} "
                f"({status.table}) and are no longer found"
            )
        wanted = self._parts.settings.embedding_of(name).model
        if target.recipe is not None and target.recipe.model.name != wanted:
            notes.append(
                f"the settings name the model {wanted}: the next sync builds a generation of it again, unless they "
                f"name {target.recipe.model.name}"
            )
        return Switched(name, target.number, serving.number, notes)

    def drop(self, spec: CollectionSpec, number: int) -> None:
        """Raises UnknownGeneration, GenerationRefused for the one that serves, LeaseLost while it is written to."""
        self._parts.store.generations.drop(spec.name, number)


def shown(generation: Generation) -> dict[str, Any]:
    """A generation as the surfaces show it."""
    return {
        "generation": generation.number,
        "state": generation.state,
        "complete": generation.complete,
        "model": generation.model,
        "dimension": generation.dimension,
        "rows": generation.rows,
        "table": generation.table,
        "created": _iso(generation.created),
        "retired": _iso(generation.retired),
        "last_sync": _iso(generation.last_sync),
        "template": None if generation.recipe is None else generation.recipe.spec.template,
    }


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()

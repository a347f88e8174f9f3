"""Generations of a collection: the recipe and model of each; list, compare, switch, drop."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.src.service.collections import Collections
from app.src.service.wiring import FAMILY, EngineEmbedder, Parts
from connector.errors import GenerationRefused, ModelMismatch
from connector.model import CollectionSpec, CollectionStatus, Generation, ModelSource, Recipe
from connector.stores.records import ModelStamp
from connector.sync.generations import (
    Comparison,
    active,
    building_for,
    chosen,
    compare,
    is_of,
    last_retired,
    needs_another,
    sample_texts,
)

_IDENTITY = ("name", "revision", "remote_source")  # of a model's source
QUERIES = 50  # stored texts that a comparison searches for by default


@dataclass(frozen=True, slots=True)
class Switched:
    """`generation` is active now; `retired` was until now."""

    collection: str
    generation: int
    retired: int
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Maker:
    """The spec and model that fill a generation. `spec` has its name in the store. `number` None: not stored yet."""

    spec: CollectionSpec
    embedder: EngineEmbedder
    number: int | None = None


class Generations:
    """Thread-safe. Methods that take a name raise UnknownCollection."""

    def __init__(self, parts: Parts, collections: Collections) -> None:
        self._parts = parts
        self._collections = collections

    def all(self, name: str, counted: bool = True) -> list[Generation]:
        """Return generations by number; [] before the first sync. Raises UnknownTable when the store's schema does not
        exist."""
        found = self._parts.store.generations.all(self._collections.spec(name).name, counted)
        if not found:
            self._parts.check_schema()
        return found

    def shown(self, name: str) -> list[dict[str, Any]]:
        """Return `all` as dictionaries for display."""
        same, times = ("state", "complete", "model", "dimension", "rows", "table"), ("created", "retired", "last_sync")
        return [
            {"generation": each.number}
            | {key: getattr(each, key) for key in same}
            | {key: None if (moment := getattr(each, key)) is None else moment.isoformat() for key in times}
            | {"template": None if each.recipe is None else each.recipe.spec.template}
            for each in self.all(name)
        ]

    def maker(self, spec: CollectionSpec, number: int | None = None) -> Maker:
        """Return the maker of generation `number`; None: the active one, from the settings if they still fit it. Raises
        UnknownGeneration, and ModelMismatch when its model is not available."""
        found = self._parts.store.generations.all(spec.name, counted=False)
        if number is not None:
            return self._maker_of(spec, chosen(spec.name, found, number))
        serving = active(found)
        try:
            stamp = ModelStamp.of(self._parts.embedder_for(spec.name))
        except self._parts.expected_errors:  # an unusable new model must not keep the active one from work
            if serving is None or serving.recipe is None or spec.written_by_clients:
                raise
            if _same(serving.recipe.model, self._parts.configured(spec.name)):
                raise
            return self._maker_of(spec, serving)
        if serving is None:
            return self.configured(spec)
        if is_of(serving, stamp) and building_for(found, stamp) is None:
            return self.configured(spec, serving.number)
        if spec.written_by_clients and not needs_another(self._parts.store, spec.name, found, stamp):
            return self.configured(spec)  # empty, and no sync would ever build a generation with the new model
        return self._maker_of(spec, serving)

    def embedder_of(self, name: str) -> EngineEmbedder:
        """Return the model of the active generation. Raises as `maker`."""
        return self.maker(self._collections.spec(name)).embedder

    def configured(self, spec: CollectionSpec, number: int | None = None) -> Maker:
        """Return the maker that the current settings describe."""
        return Maker(spec, self._parts.embedder_for(spec.name), number)

    def _maker_of(self, spec: CollectionSpec, generation: Generation) -> Maker:
        embedder = self._model_of(spec.name, generation)
        made_by = generation.recipe
        if made_by is not None:
            recorded = ("source", "template", "key", "where", "metadata", "chunk")
            spec = replace(spec, **{name: getattr(made_by.spec, name) for name in recorded})
        return Maker(replace(spec, name=generation.name), embedder, generation.number)

    def query_embedder(self, stored: CollectionStatus) -> EngineEmbedder:
        """Return the model for queries to the active generation. Raises ModelMismatch when it is not available."""
        for generation in self._parts.store.generations.all(stored.collection, counted=False):
            if generation.number == stored.generation:
                return self._model_of(stored.collection, generation)
        return self._parts.embedder_for(stored.collection)  # the generation was just dropped: the search detects this

    def _model_of(self, name: str, generation: Generation) -> EngineEmbedder:
        """Return the model of the generation, from its recipe; earlier versions recorded only the model's name. If
        the settings now compute another family of vectors, that of the generation is loaded too: float, or int8 by the
        same calibration. Raises ModelMismatch when it is not available, and retryable errors as they are."""
        configured, recipe, reasons = self._parts.configured(name), generation.recipe, []
        recorded = ModelSource(re.sub("@[0-9a-f]{8}$", "", generation.model)) if recipe is None else recipe.model
        ours = _same(recorded, configured)
        sources = [configured] if ours else [recorded, configured]
        family = recorded.precision if recorded.precision.startswith("int8-") else "float"
        if ours and _prompts(recorded) != _prompts(configured):  # the settings changed
            query, document = _prompts(recorded)
            sources.append(replace(configured, query_prompt=query, document_prompt=document))
        for source in sources:
            try:
                embedder = self._parts.embedder_of(source)
            except self._parts.expected_errors as error:
                if ours or source is recorded:  # the error of an unrelated model explains nothing
                    if getattr(error, "retryable", False):  # the model is only unavailable for now
                        raise
                    reasons.append(str(error).rstrip("."))
                continue
            if is_of(generation, ModelStamp.of(embedder)):
                return embedder
            stamp = ModelStamp.of(embedder, FAMILY.sub(family, embedder.fingerprint))
            if source.precision != family and is_of(generation, stamp):
                sources.append(replace(source, precision=family))
                continue
            if _prompts(recorded) == _prompts(source) == (None, None) and any(embedder.engine.prompts.values()):
                # Earlier versions ignored the prompts of a model's folder.
                sources.append(replace(source, query_prompt="", document_prompt=""))
            reasons.append(f"the model {embedder.model} gives other vectors")
        another = f"build another: owl-sap sync {name}, then owl-sap generations {name} --switch"
        if self._collections.block(name).documents:
            another = (
                "write the documents to another collection, or delete all of them here and write them again: an empty "
                "collection takes the model that the settings name"
            )
        raise ModelMismatch(
            f"generation {generation.number} of {name!r} was made with {generation.model} ({generation.dimension} "
            f"numbers a vector), and that model is not available: {'; '.join(reasons)}. Bring it back, search by words "
            f"(mode keyword), or {another}"
        )

    def record(self, maker: Maker) -> None:
        """Store the recipe of the generation that `maker` has filled."""
        store, name = self._parts.store, maker.spec.name.partition("@")[0]
        number = maker.number
        if number is None and (stored := active(store.generations.all(name, counted=False))) is not None:
            number = stored.number
        if number is not None:
            store.generations.record(name, number, Recipe(replace(maker.spec, name=name), maker.embedder.source))

    def compare(
        self, name: str, number: int | None = None, queries: Sequence[str] = (), sample: int = QUERIES
    ) -> Comparison:
        """Compare the hits of the active generation with those of `number` (None: the newest being built), for
        `queries` and for `sample` stored texts. Raises ModelMismatch, UnknownGeneration, GenerationRefused."""
        found = self.all(name)
        other, serving = chosen(name, found, number), active(found)
        if serving is None or other.number == serving.number:
            raise GenerationRefused(f"generation {other.number} of {name!r} is active: name another to compare it with")
        texts = [*queries, *sample_texts(self._parts.store, serving.name, sample)]
        sides = [(each, self._model_of(name, each)) for each in (serving, other)]
        return compare(self._parts.store, name, sides[0], sides[1], texts)

    def switch(self, name: str, number: int | None = None, *, force: bool = False) -> Switched:
        """Activate generation `number` (None: the newest being built). Raises UnknownGeneration, and GenerationRefused
        unless a sync has completed it or `force` is set."""
        found = self.all(name, counted=False)
        target, serving = chosen(name, found, number), active(found)
        if not target.complete and not force and target.state != "active":
            raise GenerationRefused(
                f"generation {target.number} of {name!r} is not complete, because no sync has finished. "
                f"Run: owl-sap sync {name}; --force switches to it as it is"
            )
        if serving is None or serving.number == target.number:
            raise GenerationRefused(f"generation {target.number} of {name!r} is already active")
        status = self._parts.store.status(name)
        self._parts.store.generations.switch(name, target.number)
        self._collections.changed(name)
        notes = []
        if status is not None and status.foreign:
            notes.append(
                f"{status.foreign} records that others wrote stay in generation {serving.number} "
                f"({status.table}) and are no longer found"
            )
        wanted, made = self._parts.configured(name), None if target.recipe is None else target.recipe.model
        if made is not None and made.name != wanted.name:
            notes.append(
                f"the settings name the model {wanted.name}: the next sync builds a generation of it again, unless "
                f"they name {made.name}"
            )
        elif made is not None and _prompts(made) != _prompts(wanted):
            notes.append("the settings name other prompts: the next sync builds a generation with them again")
        return Switched(name, target.number, serving.number, notes)

    def rollback(self, name: str) -> Switched:
        """Activate the previous generation. Raises GenerationRefused when there is none."""
        target = last_retired(self.all(name, counted=False))
        if target is None:
            raise GenerationRefused(f"{name!r} has no earlier generation to roll back to")
        return self.switch(name, target.number, force=True)

    def drop(self, name: str, number: int) -> None:
        """Delete a generation. Raises UnknownGeneration, GenerationRefused for the active one, LeaseLost during a
        write."""
        self._parts.store.generations.drop(self._collections.spec(name).name, number)


def _same(model: ModelSource, other: ModelSource) -> bool:
    return all(getattr(model, name) == getattr(other, name) for name in _IDENTITY)


def _prompts(model: ModelSource) -> tuple[str | None, str | None]:
    return model.query_prompt, model.document_prompt

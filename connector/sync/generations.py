"""Find the active, building and retired generations of a collection, and compare the results of two."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from connector.errors import GenerationRefused, UnknownGeneration
from connector.model import CollectionSpec, Generation, Recipe
from connector.protocols import Embedder
from connector.stores.ranking import overlap
from connector.stores.records import ModelStamp
from connector.stores.state import numbered
from connector.stores.store import VectorStore

SAMPLED_FROM = 20_000  # sample texts come from this many of the oldest records


def active(generations: Iterable[Generation]) -> Generation | None:
    return next((each for each in generations if each.state == "active"), None)


def is_of(generation: Generation, stamp: ModelStamp) -> bool:
    return (generation.fingerprint, generation.dimension) == (stamp.fingerprint, stamp.dimension)


def building_for(generations: Sequence[Generation], stamp: ModelStamp) -> Generation | None:
    """Return the generation that a sync with this model continues. Same rule as `Generations.begin`."""
    return _newest(each for each in generations if each.state == "building" and is_of(each, stamp))


def last_retired(generations: Sequence[Generation]) -> Generation | None:
    """Return the previously active generation."""
    retired = [each for each in generations if each.retired is not None and each.state == "retired"]
    return max(retired, key=lambda each: (each.retired, each.number), default=None)


def chosen(collection: str, generations: Sequence[Generation], number: int | None) -> Generation:
    """Return generation `number`; None: the newest building one. Raises UnknownGeneration, GenerationRefused."""
    if number is not None:
        return numbered(collection, generations, number)
    if not generations:
        raise UnknownGeneration(f"{collection!r} was never synced and has no generations")
    newest = _newest(each for each in generations if each.state == "building")
    if newest is None:
        raise GenerationRefused(
            f"no generation of {collection!r} is being built beside the active one: build one with "
            f"owl-sap generations {collection} --build, or give the number of another"
        )
    return newest


def _newest(generations: Iterable[Generation]) -> Generation | None:
    return max(generations, key=lambda each: each.number, default=None)


def needs_another(store: VectorStore, collection: str, generations: Sequence[Generation], stamp: ModelStamp) -> bool:
    """Return whether the active generation has rows of another model; vectors of two models must not be mixed."""
    serving = active(generations)
    if serving is None or is_of(serving, stamp):
        return False
    status = store.status(collection)
    return status is not None and status.chunks + status.foreign > 0


def filled_by_sync(store: VectorStore, recipe: Recipe, embedder: Embedder) -> tuple[CollectionSpec, VectorStore | None]:
    """Return the recipe's spec, named after the generation that a sync would fill, and the store to compare with the
    source; None instead of the store if the sync would begin a new generation."""
    spec, stamp = recipe.spec, ModelStamp.of(embedder)
    found = store.generations.all(spec.name, counted=False)
    if building_for(found, stamp) is None and not needs_another(store, spec.name, found, stamp):
        return spec, store
    name = store.generations.resumed(spec.name, embedder, recipe)
    return (spec, None) if name is None else (replace(spec, name=name), store)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How alike two generations answer `queries` texts; null without queries. `overlap_at_10`: mean share of the first
    ten rows that both find; `same_first`: share of queries with the same best row. `complete`: of the other one."""

    collection: str
    serving: int
    other: int
    serving_rows: int
    other_rows: int
    complete: bool
    queries: int
    overlap_at_10: float | None
    same_first: float | None


Side = tuple[Generation, Embedder]  # a generation and the model for its queries


def compare(store: VectorStore, collection: str, serving: Side, other: Side, texts: Sequence[str]) -> Comparison:
    """Search both generations for each text. Raises TextsNotEmbeddable for a text without a vector."""
    alike = []
    for text in texts:
        found = []
        for generation, embedder in (serving, other):
            hits = store.view(generation.name, generation.number).search(embedder.embed_query(text), 10)
            found.append([hit.id for hit in hits if not hit.id.startswith("record:")])
        first, second = found
        if first or second:
            alike.append((overlap(first, second), float(first[:1] == second[:1])))
    means = [round(sum(values) / len(alike), 4) for values in zip(*alike, strict=True)] if alike else [None] * 2
    (ours, _), (theirs, _) = serving, other
    rows = ours.rows or 0, theirs.rows or 0
    return Comparison(collection, ours.number, theirs.number, *rows, theirs.complete, len(alike), *means)


def sample_texts(store: VectorStore, name: str, count: int) -> list[str]:
    """Return up to `count` different stored texts, chosen at random with a fixed seed."""
    texts: dict[str, None] = {}
    for page in store.records(name, vectors=False) if count else ():
        texts |= {record.text: None for record in page if record.id is not None and record.text}
        if len(texts) >= SAMPLED_FROM:
            break
    return random.Random(11).sample(list(texts), min(count, len(texts)))

"""What every store decides the same way about generations: their numbers, which unfinished one is built on, and what it
refuses. Knows no SQL.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from connector.errors import GenerationChanged, GenerationRefused, UnknownCollection, UnknownGeneration
from connector.model import GenerationState, Recipe
from connector.stores.records import ModelStamp, same_spec

DROPPED = ""
"""The fingerprint of a generation whose deletion has begun: no model has it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A generation as far as it matters here; `spec` is the recipe's text."""

    name: str
    number: int
    state: GenerationState
    stamp: ModelStamp
    spec: str | None


def resumable(collection: str, there: Sequence[Candidate], stamp: ModelStamp, recipe: Recipe) -> Candidate | None:
    """The newest unfinished one of this model: whatever changed in its recipe, the next sync heals in place. Else the
    newest retired one of this model and recipe; one of another recipe is kept to go back to."""
    newest_first = sorted((one for one in there if one.stamp == stamp), key=lambda one: -one.number)
    for one in newest_first:
        if one.state == "building":
            return one
    for one in newest_first:
        if one.state == "retired" and same_spec(collection, one.spec, recipe):
            return one
    return None


def free_number(used: Iterable[tuple[int, int]]) -> int:
    """`used`: the numbers there are, each with the highest that was known when an older one was dropped."""
    return max((max(pair) for pair in used), default=0) + 1


def metadata_names_text(names: Mapping[str, Mapping[str, str]], collection: str) -> str:
    return json.dumps(dict(names.get(collection, {})))


def no_collection(collection: str) -> UnknownCollection:
    return UnknownCollection(f"the store has no collection {collection!r}; `sync` creates it")


def no_generation(collection: str, number: int, there: Sequence[int]) -> UnknownGeneration:
    if not there:
        return UnknownGeneration(f"{collection!r} was never synced and has no generations")
    known = ", ".join(map(str, sorted(there)))
    return UnknownGeneration(f"{collection!r} has no generation {number}; there are: {known}")


def is_active(collection: str, number: int) -> GenerationRefused:
    return GenerationRefused(
        f"generation {number} of {collection!r} serves the searches and is not dropped: switch to another first"
    )


def changed(collection: str, asked: int, serving: int) -> GenerationChanged:
    return GenerationChanged(
        f"{collection!r} is served by generation {serving} now, no longer by {asked}: search again"
    )


def half_dropped(collection: str, number: int) -> GenerationRefused:
    return GenerationRefused(f"generation {number} of {collection!r} was being dropped; drop it again to finish that")

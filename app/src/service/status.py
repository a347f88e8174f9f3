"""What is told of collections and of the service itself, as every surface shows it. Computes nothing but ages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.src.service.readiness import choices
from app.src.settings import Settings
from connector.model import CollectionStatus
from connector.sync.schema import WRITTEN

if TYPE_CHECKING:
    from app.src.core.engine import EmbeddingEngine

_NEVER_SYNCED = ("generation", "rows", "chunks", "foreign", "empty", "quarantined")
"""Counts that are 0 before the first sync; everything else is not known yet."""
HUB_PARTS = 2
"""Of a hub's name: whose it is, and what."""
_INNER = "checkpoint"
"""Of a status, for sync alone."""
_KEYS = (
    *(item.name for item in fields(CollectionStatus) if item.name != _INNER),
    "lag_seconds",
    "method",
    "last_full",
)


def shown(status: CollectionStatus, lag: float | None) -> dict[str, Any]:
    """`lag` in seconds: how far behind its source it is at most; None: nobody knows."""
    from connector.stores.records import in_utc

    last, checkpoint = in_utc(status.last_sync), status.checkpoint
    full = in_utc(checkpoint.last_full)
    told = {name: value for name, value in asdict(status).items() if name != _INNER}
    return told | {
        "last_sync": None if last is None else last.isoformat(),
        "lag_seconds": None if lag is None else round(lag, 1),
        "method": (checkpoint.mark or {}).get("method", "full"),
        "last_full": None if full is None else full.isoformat(),
    }


def never_synced(name: str, settings: Settings) -> dict[str, Any]:
    """0 rows and no table; of a collection that clients write, that they do."""
    store = settings.store
    empty = dict.fromkeys(_KEYS) | dict.fromkeys(_NEVER_SYNCED, 0)
    schema = settings.store_schema if store.kind == "hana" else None
    by_clients = any(each.name == name and each.documents for each in settings.collections)
    method = WRITTEN["method"] if by_clients else None
    return empty | {"collection": name, "store": store.kind, "schema": schema, "method": method}


EngineOf = Callable[[str], "EmbeddingEngine | None"]
"""Of a collection, as far as it is loaded."""


def of_service(version: str, engine: EmbeddingEngine, settings: Settings, engine_of: EngineOf) -> dict[str, Any]:
    """What `/v1/info` says. Loads nothing."""
    api = settings.api
    return {
        "version": version,
        "model": engine.model,
        "dimension": engine.dimension,
        "max_tokens": engine.max_tokens,
        "fingerprint": engine.fingerprint,
        "device": _computed_on(engine),
        "models": own_models(settings, engine_of),
        "settings": [asdict(each) for each in choices(engine)],
        "store": settings.store.kind,
        "collections": [collection.name for collection in settings.collections],
        "limits": {
            "max_body_bytes": api.max_body_bytes,
            "max_inputs": api.max_inputs,
            "max_text_chars": api.max_text_chars,
            "max_k": api.max_k,
        },
    }


def own_models(settings: Settings, engine_of: EngineOf) -> list[dict[str, Any]]:
    """The models that collections have of their own, each once; what is not loaded yet is known by its name alone. Of a
    folder only the last part of its path is told."""
    collections: dict[str, list[str]] = {}
    for each in settings.collections:
        if each.model is not None and each.model != settings.embedding.model:
            collections.setdefault(each.model, []).append(each.name)
    return [_of_model(model, names, engine_of(names[0])) for model, names in collections.items()]


def _of_model(model: str, collections: list[str], engine: EmbeddingEngine | None) -> dict[str, Any]:
    told = {"model": _shown_name(model), "collections": collections, "loaded": engine is not None}
    if engine is None:
        return told | dict.fromkeys(("dimension", "max_tokens", "fingerprint", "device"))
    return told | {
        "model": engine.model,
        "dimension": engine.dimension,
        "max_tokens": engine.max_tokens,
        "fingerprint": engine.fingerprint,
        "device": _computed_on(engine),
    }


def _shown_name(model: str) -> str:
    """A packaged name or a hub's as it stands; a path is nobody's business."""
    path = Path(model)
    is_path = path.is_absolute() or len(path.parts) > HUB_PARTS or model.startswith(("./", "../", "~"))
    return path.name if is_path else model


def _computed_on(engine: EmbeddingEngine) -> dict[str, Any]:
    return {
        "kind": engine.profile.kind,
        "name": engine.profile.name,
        "precision": engine.precision,
        "precision_reason": engine.precision_reason,
        "path": engine.path,
        "path_reason": engine.path_reason,
    }

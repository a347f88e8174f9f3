"""The state of the collections and of the service itself, as every surface shows it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.src.service.background import Background
from app.src.service.collections import Collections
from app.src.service.readiness import choices
from app.src.service.watching import behind
from app.src.service.wiring import Parts
from app.src.settings import Settings
from connector.model import CollectionStatus
from connector.sync.schema import WRITTEN

if TYPE_CHECKING:
    from app.src.core.engine import EmbeddingEngine

DISTRIBUTION = "owl-sap-connector"
GPU_WITHIN = 2.0  # seconds for NVIDIA's driver: it takes 50 ms a card, and may never answer when a card has died
HUB_PARTS = 2  # of a hub's model name: owner and model
_ZERO = ("generation", "rows", "chunks", "foreign", "empty", "quarantined")  # before the first sync; the rest is null
_INTERNAL = "checkpoint"
_KEYS = (
    *(item.name for item in fields(CollectionStatus) if item.name != _INTERNAL),
    "lag_seconds",
    "method",
    "last_full",
)


def version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


class Status:
    """Thread-safe."""

    def __init__(self, parts: Parts, collections: Collections, background: Background) -> None:
        self._parts = parts
        self._collections = collections
        self._background = background

    def collections(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """One entry per collection; before its first sync with 0 rows and no table. Raises UnknownCollection, and
        UnknownTable when the store's schema does not exist."""
        entries = []
        for name in self._collections.names if names is None else names:
            self._collections.spec(name)
            status = self._collections.stored(name)
            shown = _never_synced(name, self._parts.settings) if status is None else _shown(status)
            entries.append(shown | self._background.shown(name, status))
        return entries

    def info(self) -> dict[str, Any]:
        """The answer of `/v1/info`. Loads the engine."""
        settings, engine = self._parts.settings, self._parts.engine
        api = settings.api
        return {
            "version": version(),
            "model": engine.model,
            "dimension": engine.dimension,
            "max_tokens": engine.max_tokens,
            "fingerprint": engine.fingerprint,
            "device": _device(engine),
            "models": own_models(settings, self._parts.engine_if_loaded_for),
            "settings": [asdict(each) for each in choices(engine)],
            "store": settings.store.kind,
            "collections": self._collections.names,
            "limits": {
                "max_body_bytes": api.max_body_bytes,
                "max_inputs": api.max_inputs,
                "max_text_chars": api.max_text_chars,
                "max_k": api.max_k,
            },
        }

    def gpu(self) -> dict[str, Any]:
        """What NVIDIA's driver reports now, within GPU_WITHIN. Loads no engine."""
        from app.src.core.nvml import snapshot_within

        return snapshot_within(GPU_WITHIN).as_dict()


def _shown(status: CollectionStatus) -> dict[str, Any]:
    from connector.stores.records import in_utc

    last, checkpoint, lag = in_utc(status.last_sync), status.checkpoint, behind(status).lag
    full = in_utc(checkpoint.last_full)
    shown = {name: value for name, value in asdict(status).items() if name != _INTERNAL}
    return shown | {
        "last_sync": None if last is None else last.isoformat(),
        "lag_seconds": None if lag is None else round(lag, 1),
        "method": (checkpoint.mark or {}).get("method", "full"),
        "last_full": None if full is None else full.isoformat(),
    }


def _never_synced(name: str, settings: Settings) -> dict[str, Any]:
    store = settings.store
    empty = dict.fromkeys(_KEYS) | dict.fromkeys(_ZERO, 0)
    schema = settings.store_schema if store.kind == "hana" else None
    by_clients = any(each.name == name and each.documents for each in settings.collections)
    method = WRITTEN["method"] if by_clients else None
    return empty | {"collection": name, "store": store.kind, "schema": schema, "method": method}


EngineOf = Callable[[str], "EmbeddingEngine | None"]
"""The engine of a collection, None while it is not loaded."""


def own_models(settings: Settings, engine_of: EngineOf) -> list[dict[str, Any]]:
    """Return the models that only single collections use, each once. A model that is not loaded has only a name; of a
    folder only the last part of the path is shown."""
    collections: dict[str, list[str]] = {}
    for each in settings.collections:
        if each.model is not None and each.model != settings.embedding.model:
            collections.setdefault(each.model, []).append(each.name)
    return [_of_model(model, names, engine_of(names[0])) for model, names in collections.items()]


def _of_model(model: str, collections: list[str], engine: EmbeddingEngine | None) -> dict[str, Any]:
    shown = {"model": _shown_name(model), "collections": collections, "loaded": engine is not None}
    if engine is None:
        return shown | dict.fromkeys(("dimension", "max_tokens", "fingerprint", "device"))
    return shown | {
        "model": engine.model,
        "dimension": engine.dimension,
        "max_tokens": engine.max_tokens,
        "fingerprint": engine.fingerprint,
        "device": _device(engine),
    }


def _shown_name(model: str) -> str:
    """Return a packaged or hub name unchanged, and the last part of a path."""
    path = Path(model)
    is_path = path.is_absolute() or len(path.parts) > HUB_PARTS or model.startswith(("./", "../", "~"))
    return path.name if is_path else model


def _device(engine: EmbeddingEngine) -> dict[str, Any]:
    return {
        "kind": engine.profile.kind,
        "name": engine.profile.name,
        "precision": engine.precision,
        "precision_reason": engine.precision_reason,
        "path": engine.path,
        "path_reason": engine.path_reason,
    }

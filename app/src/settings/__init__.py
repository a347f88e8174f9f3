"""Settings: their model (`model`), further variables (`variables`), and reading them (`sources`, the only module that
reads the environment)."""

from app.src.settings.collections import CollectionSettings
from app.src.settings.model import AccessSettings, ApiSettings, EmbeddingSettings, HanaSettings, Settings, is_loopback
from app.src.settings.section import seconds
from app.src.settings.sources import (
    InvalidCollection,
    Loaded,
    SettingsError,
    collection_of,
    load,
    no_collections,
    show,
)

__all__ = [
    "AccessSettings",
    "ApiSettings",
    "CollectionSettings",
    "EmbeddingSettings",
    "HanaSettings",
    "InvalidCollection",
    "Loaded",
    "Settings",
    "SettingsError",
    "collection_of",
    "is_loopback",
    "load",
    "no_collections",
    "seconds",
    "show",
]

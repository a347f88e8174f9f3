"""Settings: their model (`model`), further variables (`variables`), and reading them (`sources`, the only module that
reads the environment)."""

from app.src.settings.access import AccessSettings, JwtSettings, is_loopback
from app.src.settings.collections import CollectionSettings, ScheduleSettings
from app.src.settings.model import (
    ApiSettings,
    EmbeddingSettings,
    HanaSettings,
    McpSettings,
    SearchSettings,
    Settings,
    StateSettings,
    StoreSettings,
    SyncSettings,
    TensorRtSettings,
    WorkerSettings,
)
from app.src.settings.section import Duration, seconds
from app.src.settings.sources import Loaded, SettingsError, load, no_collections, show

__all__ = [
    "AccessSettings",
    "ApiSettings",
    "CollectionSettings",
    "Duration",
    "EmbeddingSettings",
    "HanaSettings",
    "JwtSettings",
    "Loaded",
    "McpSettings",
    "ScheduleSettings",
    "SearchSettings",
    "Settings",
    "SettingsError",
    "StateSettings",
    "StoreSettings",
    "SyncSettings",
    "TensorRtSettings",
    "WorkerSettings",
    "is_loopback",
    "load",
    "no_collections",
    "seconds",
    "show",
]

"""Settings: the model (`model`), the variables it answers to (`variables`), and reading them (`sources`, the only
module of the product that looks at the environment). Knows no connection, no engine and no HTTP.
"""

from app.src.settings.model import (
    ApiSettings,
    CollectionSettings,
    EmbeddingSettings,
    HanaSettings,
    Settings,
    StateSettings,
    StoreSettings,
    SyncSettings,
)
from app.src.settings.sources import Loaded, SettingsError, load, no_collections, proxy_variables, show

__all__ = [
    "ApiSettings",
    "CollectionSettings",
    "EmbeddingSettings",
    "HanaSettings",
    "Loaded",
    "Settings",
    "SettingsError",
    "StateSettings",
    "StoreSettings",
    "SyncSettings",
    "load",
    "no_collections",
    "proxy_variables",
    "show",
]

"""The row rights of the configured collections, by name. Knows the settings and the rules; no store, no HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from app.src.access.audit import shape_of
from app.src.access.principal import Principal
from app.src.access.rows import Nothing, check_every_row, visible
from app.src.settings import CollectionSettings, Settings
from connector.model import Filter


class Rights:
    """`block` finds a collection by its name. Everything here raises UnknownCollection as it does."""

    def __init__(self, settings: Settings, block: Callable[[str], CollectionSettings]) -> None:
        self._settings = settings
        self._block = block

    def visible(self, name: str, principal: Principal) -> Filter | Nothing | None:
        """As `rows.visible`."""
        from connector.document.document import metadata_names

        block = self._block(name)
        return visible(block.row_rights, metadata_names(block.metadata), principal)

    def check_every_row(self, principal: Principal, name: str | None = None) -> None:
        """For what shows rows of the collection (None: of any table) whoever they belong to. Raises RowsRefused."""
        for block in self._settings.collections if name is None else [self._block(name)]:
            check_every_row(block.name, block.row_rights, principal)

    def filter_shape(self, name: str, where: Filter | None) -> Any:
        """As `audit.shape_of`."""
        from connector.document.document import metadata_names

        return shape_of(where, metadata_names(self._block(name).metadata))

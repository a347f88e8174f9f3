"""The configured collections by name, and what the store holds of each."""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from app.src.service.wiring import Parts
from app.src.settings import CollectionSettings, no_collections
from connector.errors import ConfigurationError, DatabaseError, GenerationChanged, UnknownCollection
from connector.model import CollectionSpec, CollectionStatus
from connector.sync.documents import nothing_to_sync

TRIES = 3  # a read is repeated this often when another generation becomes active during it
_STATUS_SECONDS = 5.0  # age of a remembered status: asking the store counts its rows

Result = TypeVar("Result")


class Collections:
    """Thread-safe. `spec`, `block` and all that take a name raise UnknownCollection for a name not in the settings."""

    def __init__(self, parts: Parts, file: Path | None = None) -> None:
        """`file`: where the settings were read, for messages."""
        self._parts = parts
        self._file = file
        self._blocks = {block.name: block for block in parts.settings.collections}
        self._specs: dict[str, CollectionSpec] = {}
        self._remembered: dict[str, tuple[float, CollectionStatus]] = {}
        self._listeners: list[Callable[[str], None]] = []
        self.names = list(self._blocks)
        self.synced_names = [block.name for block in parts.settings.synced]

    def block(self, name: str) -> CollectionSettings:
        if name in self._blocks:
            return self._blocks[name]
        if not self._blocks:
            raise UnknownCollection(f'no collection is named "{name}"; {no_collections(self._file)}')
        near = difflib.get_close_matches(name, self.names, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(self.names)}"
        raise UnknownCollection(f'no collection is named "{name}"; {hint}')

    def spec(self, name: str) -> CollectionSpec:
        if name not in self._specs:
            self._specs[name] = self.block(name).spec()
        return self._specs[name]

    def spec_of_table(self, name: str) -> CollectionSpec:
        """As `spec`. Raises WrongOrigin for a collection that clients write."""
        spec = self.spec(name)
        if spec.written_by_clients:
            raise nothing_to_sync(name)
        return spec

    # ---------------------------------------------------------------------------------------------- what is stored

    def stored(self, name: str) -> CollectionStatus | None:
        """None before the first sync. Raises UnknownTable when the store's schema does not exist."""
        status = self._parts.store.status(name)
        if status is None:
            self._parts.check_schema()
        return status

    def active(self, name: str) -> CollectionStatus:
        """As `stored`, at most a few seconds old. Raises UnknownCollection before the first sync."""
        asked, status = self._remembered.get(name, (-math.inf, None))
        if status is None or time.monotonic() - asked >= _STATUS_SECONDS:
            status = self.stored(name)
            if status is None:
                raise UnknownCollection(f'the collection "{name}" was never synced; run: owl-sap sync {name}')
            self._remembered[name] = (time.monotonic(), status)
        return status

    def in_one_generation(self, name: str, read: Callable[[CollectionStatus], Result]) -> Result:
        """Return `read` of the active generation; repeat it when another one becomes active meanwhile. Raises
        GenerationChanged after TRIES, and as `active`."""
        for _ in range(TRIES - 1):
            try:
                return read(self.active(name))
            except GenerationChanged:
                self._remembered.pop(name, None)
        return read(self.active(name))

    def is_empty(self, spec: CollectionSpec) -> bool:
        """Whether clients write it and have written nothing yet: reading it is not an error then."""
        if not spec.written_by_clients:
            return False
        try:
            self.active(spec.name)
        except UnknownCollection:
            return True
        return False

    def key_columns(self, name: str, stored: CollectionStatus | None = None) -> tuple[str, ...]:
        """Return the key columns that the rows were stored by (before the first sync: the configured ones); () if the
        source is away before a first full run. `stored`: the status, if the caller has it."""
        spec, stored = self.spec(name), stored or self.stored(name)
        if stored is None:
            return spec.key
        if stored.key or spec.key:
            return stored.key or spec.key
        try:
            return self._parts.source.describe(spec.source).primary_key
        except (DatabaseError, ConfigurationError):
            return ()

    # ------------------------------------------------------------------------------------------------------ changes

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the name of each collection that this process has written to."""
        self._listeners.append(listener)

    def changed(self, name: str) -> None:
        """Rows were written, or another generation is active: drop what is remembered of the collection."""
        self._remembered.pop(name, None)
        for listener in self._listeners:
            listener(name)

"""The configured collections by name, their stored state, and cached reads of their visible rows."""

from __future__ import annotations

import difflib
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from app.src.access.files import Reloaded
from app.src.access.rows import Nothing, seen
from app.src.service.wiring import Parts
from app.src.settings import CollectionSettings, SettingsError, load, no_collections
from connector.errors import ConfigurationError, DatabaseError, GenerationChanged, UnknownCollection
from connector.model import CollectionSpec, CollectionStatus, Filter, Hit, Sample, StoredText
from connector.stores.store import VectorStore

TRIES = 3  # attempts of a read during which another generation becomes active
_STATUS_SECONDS = 5.0  # longest age of a cached status: the store counts rows for a new one

Result = TypeVar("Result")


class VisibleView:
    """The rows of one generation that a caller may see. Filters every result by `within` again, in case the store is
    faulty. Raises the errors of `connector.stores.store.View`."""

    def __init__(self, store: VectorStore, stored: CollectionStatus, within: Filter | None) -> None:
        self._view = view = store.view(stored.collection, stored.generation, within)
        self.within = within
        # Places have no metadata to filter them again, so their rows must be read with `texts`.
        self.places, self.vectors, self.index_use = view.places, view.vectors, view.index_use
        # Collection, generation, and row filter: callers with other rights must not share results.
        self.key = (stored.collection, stored.generation, json.dumps(within, sort_keys=True))

    def search(self, vector: NDArray[np.float32], k: int, where: Filter | None) -> list[Hit]:
        return seen(self._view.search(vector, k, where), self.within)

    def keyword(self, text: str, k: int, where: Filter | None) -> list[Hit]:
        return seen(self._view.keyword(text, k, where), self.within)

    def keyed(self, number: str, count: int, where: Filter | None) -> list[Hit]:
        return seen(self._view.keyed(number, count, where), self.within)

    def texts(self, ids: Sequence[str]) -> list[StoredText]:
        return seen(self._view.texts(ids), self.within)

    def sample(self, count: int, *, texts: bool = True) -> Sample:
        found = self._view.sample(count, texts=texts)
        chosen = seen(found.chosen, self.within)
        # A store that returned invisible rows has counted them too.
        return Sample(chosen, found.rows if len(chosen) == len(found.chosen) else len(chosen))


class _Blocks(Reloaded[tuple[CollectionSettings, ...]]):
    """The collections of the settings file."""

    content = ()  # until the first `refresh`

    def load(self) -> tuple[CollectionSettings, ...]:
        try:
            return load(self._paths[0]).settings.collections
        except SettingsError as error:
            raise ConfigurationError(f"new collections are not read: {error}") from None


class Collections:
    """Thread-safe. Methods that take a name raise UnknownCollection if the name is not in the settings.

    Blocks that are added to the settings file are noticed by `refresh`. Changed and removed ones take effect when the
    process starts again, because syncs and searches may be using them.
    """

    def __init__(self, parts: Parts, file: Path | None = None) -> None:
        """`file`: the settings file. `on_change` is called after each write of this process, each of `on_new` with a
        new collection. `names` and `synced_names` grow."""
        self._parts = parts
        self.file = file
        self._in_file = None if file is None else _Blocks(file)
        self._adding = threading.Lock()
        self.on_new: list[Callable[[CollectionSettings], None]] = []
        self._blocks = {block.name: block for block in parts.settings.collections}
        self._specs: dict[str, CollectionSpec] = {}
        self._statuses: dict[str, tuple[float, CollectionStatus]] = {}
        self.on_change: Callable[[], None] = lambda: None
        self.names = list(self._blocks)
        self.synced_names = [block.name for block in parts.settings.synced]

    def block(self, name: str) -> CollectionSettings:
        if name not in self._blocks:
            self.refresh()
        if name in self._blocks:
            return self._blocks[name]
        if not self._blocks:
            raise UnknownCollection(f'no collection is named "{name}"; {no_collections(self.file)}')
        near = difflib.get_close_matches(name, self.names, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(self.names)}"
        raise UnknownCollection(f'no collection is named "{name}"; {hint}')

    def blocks(self) -> tuple[CollectionSettings, ...]:
        return self._parts.settings.collections

    def refresh(self) -> None:
        """Add the new collections of a changed settings file. Looks at the file at most twice a second."""
        if self._in_file is not None:
            self._in_file.refresh()
            if self._in_file.fault is None:
                self.add(self._in_file.content)

    def add(self, blocks: Iterable[CollectionSettings]) -> None:
        """Add those whose names are new."""
        with self._adding:
            for block in blocks:
                if block.name not in self._blocks:
                    self._parts.add(block)
                    self._blocks[block.name] = block
                    self.names.append(block.name)
                    if not block.documents:
                        self.synced_names.append(block.name)
                    for each in self.on_new:
                        each(block)

    def spec(self, name: str) -> CollectionSpec:
        if name not in self._specs:
            self._specs[name] = self.block(name).spec()
        return self._specs[name]

    def spec_of_table(self, name: str) -> CollectionSpec:
        """Return the spec of a collection with a source table. Raises WrongOrigin for one that clients write."""
        spec = self.spec(name)
        if spec.written_by_clients:
            from connector.sync.documents import nothing_to_sync

            raise nothing_to_sync(name)
        return spec

    def stored(self, name: str) -> CollectionStatus | None:
        """Return the stored state, None before the first sync. Raises UnknownTable when the store's schema does not
        exist."""
        status = self._parts.store.status(name)
        if status is None:
            self._parts.check_schema()
        return status

    def read(
        self, name: str, within: Filter | Nothing | None, read: Callable[[VisibleView, CollectionStatus], Result]
    ) -> Result | None:
        """Return the result of `read` on the visible rows of the active generation; retry if another one becomes active
        during the read. Return None if no row is visible, or clients write the collection and have not yet done so.
        Raises UnknownCollection before the first sync, and GenerationChanged after TRIES."""
        for left in reversed(range(TRIES)):
            asked, stored = self._statuses.get(name, (-math.inf, None))
            if stored is None or time.monotonic() - asked >= _STATUS_SECONDS:
                stored = self.stored(name)
                if stored is None and self.spec(name).written_by_clients:
                    return None
                if stored is None:
                    raise UnknownCollection(f'the collection "{name}" was never synced; run: owl-sap sync {name}')
                self._statuses[name] = (time.monotonic(), stored)
            if isinstance(within, Nothing):
                return None
            try:
                return read(VisibleView(self._parts.store, stored, within), stored)
            except GenerationChanged:
                self._statuses.pop(name, None)
                if not left:
                    raise
        return None

    def key_columns(self, name: str, stored: CollectionStatus | None = None) -> tuple[str, ...]:
        """Return the key columns of the stored rows; before the first sync the configured ones. () if the source is
        unreachable before a first full run. `stored`: the status, if known."""
        spec, stored = self.spec(name), stored or self.stored(name)
        if stored is None:
            return spec.key
        if stored.key or spec.key:
            return stored.key or spec.key
        try:
            return self._parts.source.describe(spec.source).primary_key
        except (DatabaseError, ConfigurationError):
            return ()

    def changed(self, name: str) -> None:
        """Drop cached data of a collection after a write or a change of generation."""
        self._statuses.pop(name, None)
        self.on_change()

"""The change log of a collection with method `log`: look, install, remove."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.src.service.collections import Collections
from app.src.service.wiring import Parts
from connector.errors import ConfigurationError
from connector.model import CollectionSpec

if TYPE_CHECKING:
    from connector.hana.change_setup import Setup


class ChangeLogs:
    """Raises as `connector.hana.change_setup` does, and UnknownCollection."""

    def __init__(self, parts: Parts, collections: Collections) -> None:
        self._parts = parts
        self._collections = collections

    def look(self, name: str) -> Setup:
        """Return what is installed. Only reads the catalogue."""
        from connector.hana.change_setup import look

        return look(self._parts.pool("hana"), _by_log(self._collections.spec(name)), self._user())

    def install(self, name: str) -> Setup:
        from connector.hana.change_setup import install

        return install(self._parts.pool("hana"), _by_log(self._collections.spec(name)), self._user())

    def remove(self, name: str) -> Setup:
        """With any method: triggers may be left from when it was `log`."""
        from connector.hana.change_setup import remove

        return remove(self._parts.pool("hana"), self._collections.spec(name), self._user())

    def _user(self) -> str:
        """The user in the GRANT statements that are shown."""
        return self._parts.settings.hana.user or ""


def _by_log(spec: CollectionSpec) -> CollectionSpec:
    if spec.changes.method != "log":
        raise ConfigurationError(
            f'collection "{spec.name}" finds changes by "{spec.changes.method}", which needs nothing to be installed; '
            'set changes = { method = "log" } first'
        )
    return spec

"""The change log of a collection (method `log`): what of it is there, putting it in, taking it out. Knows the parts, no
HTTP and no terminal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.src.service.wiring import Parts
from connector.errors import ConfigurationError
from connector.model import CollectionSpec

if TYPE_CHECKING:
    from connector.hana.change_setup import Setup


class Changes:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def look(self, spec: CollectionSpec) -> Setup:
        """Reads the catalogue only. Raises as `connector.hana.change_setup.look` does."""
        from connector.hana.change_setup import look

        return look(self._parts.pool("hana"), _by_log(spec), self._user())

    def install(self, spec: CollectionSpec) -> Setup:
        from connector.hana.change_setup import install

        return install(self._parts.pool("hana"), _by_log(spec), self._user())

    def remove(self, spec: CollectionSpec) -> Setup:
        """Whatever the method is now: triggers may be left from when it was `log`."""
        from connector.hana.change_setup import remove

        return remove(self._parts.pool("hana"), spec, self._user())

    def _user(self) -> str:
        """For the grants that a person is shown."""
        return self._parts.settings.hana.user or ""


def _by_log(spec: CollectionSpec) -> CollectionSpec:
    if spec.changes.method != "log":
        raise ConfigurationError(
            f'collection "{spec.name}" finds changes by "{spec.changes.method}", which needs nothing to be installed; '
            'set changes = { method = "log" } first'
        )
    return spec

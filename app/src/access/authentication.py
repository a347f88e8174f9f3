"""A credential to its principal, by API keys and by tokens. Knows no HTTP framework; never shows what it was given."""

from __future__ import annotations

from app.src.access.errors import AccessUnusable, Unauthenticated
from app.src.access.keys import PREFIX, KeyRing
from app.src.access.principal import Principal
from app.src.settings import AccessSettings


class Authentication:
    """Thread-safe. `configured`: does anybody have to say who they are?"""

    def __init__(self, settings: AccessSettings) -> None:
        """Reads nothing yet: `open` does."""
        self.settings = settings
        self.configured = settings.configured
        self._keys = None if settings.keys is None else KeyRing(settings.keys)

    def open(self) -> None:
        """Raises AccessUnusable for a file that cannot be used."""
        if self._keys is not None:
            self._keys.open()
        if self.settings.jwt is not None:
            raise AccessUnusable("access.jwt: this version does not take tokens yet")

    @property
    def fault(self) -> str | None:
        """What is wrong with the keys now, for readiness and doctor; those read before are still good."""
        if self._keys is None:
            return None
        self._keys.refresh()
        return self._keys.fault

    async def principal(self, credential: str) -> Principal:
        """Who has this credential. Raises Unauthenticated."""
        if credential.startswith(PREFIX) and self._keys is not None:
            return self._keys.principal(credential)
        raise Unauthenticated("this is no API key", "unknown_key")

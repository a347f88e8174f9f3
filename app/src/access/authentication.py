"""Find the principal of a credential: an API key or a token. Messages never repeat the credential."""

from __future__ import annotations

from concurrent.futures import wait
from typing import TYPE_CHECKING

from app.src.access.keys import PREFIX, KeyRing
from app.src.access.principal import ISSUER_AWAY, Principal, Unauthenticated
from app.src.settings import AccessSettings
from app.src.settings.model import JwtSettings

if TYPE_CHECKING:
    from app.src.access.tokens import Tokens

_WAIT_SECONDS = JwtSettings.fetch_seconds + 1  # for the whole answer


class Authentication:
    """`configured`: whether requests need a credential."""

    def __init__(self, settings: AccessSettings) -> None:
        """Store the settings; `open` reads the files."""
        self.settings = settings
        self.configured = settings.configured
        self._keys = None if settings.keys is None else KeyRing(settings.keys)
        self._tokens: Tokens | None = None
        if settings.jwt is not None:
            from app.src.access.tokens import Tokens

            self._tokens = Tokens(settings.jwt)

    def open(self) -> None:
        """Read the files. Raises AccessUnusable for an unusable one."""
        if self._keys is not None:
            self._keys.open()
        if self._tokens is not None:
            self._tokens.keys.open()

    def check(self, *, everything: bool = False) -> str | None:
        """Return why no caller can be authenticated, or None. `everything`: keys and tokens must both work. May wait
        for the issuer."""
        if self._keys is not None:
            self._keys.refresh()
            if self._keys.fault is not None or not everything:
                return self._keys.fault
        if self._tokens is None:
            return None
        keys = self._tokens.keys
        if not keys.believed and keys.due():
            wait((keys.refresh(),), _WAIT_SECONDS)
        return None if keys.believed else keys.fault or f"{keys.source}: the issuer has not answered yet"

    def described(self) -> str:
        """Return one line for doctor."""
        parts = [] if self._keys is None else [self._keys.described()]
        if self.settings.jwt is not None:
            parts.append(f"tokens of {self.settings.jwt.issuer}, whose keys are available")
        return "; ".join(parts)

    async def principal(self, credential: str) -> Principal:
        """Return the principal of this credential; waits only for the issuer's keys. Raises Unauthenticated."""
        if self._keys is not None and (credential.startswith(PREFIX) or self._tokens is None):
            return self._keys.principal(credential)
        if self._tokens is None:
            raise Unauthenticated("API keys are not taken here", "unknown_key")
        keys, principal = self._tokens.keys, self._tokens.principal(credential)
        if keys.due(unknown=principal is None):
            fetched = keys.refresh()  # in the background if the current keys suffice
            if principal is None:
                import asyncio  # takes 20 ms, and a verb calls no coroutine

                await asyncio.wait((asyncio.wrap_future(fetched),), timeout=_WAIT_SECONDS)
        principal = principal or self._tokens.principal(credential)
        if principal is not None:
            return principal
        if keys.believed:
            why = "the token is signed with a key that its issuer does not publish for its algorithm"
            raise Unauthenticated(why, "unknown_kid")
        why = "the token issuer's keys are unavailable, so tokens cannot be checked now; try again later"
        raise Unauthenticated(why, ISSUER_AWAY)

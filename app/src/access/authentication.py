"""Find the principal of a credential: an API key or a token. Messages never repeat the credential."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from app.src.access.jwks import FETCH_SECONDS, Address, File, KeySet
from app.src.access.keys import PREFIX, KeyRing
from app.src.access.principal import IssuerAway, Principal, Unauthenticated
from app.src.access.tokens import Tokens, UnknownKey, token_rules
from app.src.settings import AccessSettings, JwtSettings

_AWAY = "the token issuer's keys are unavailable, so tokens cannot be checked now; try again later"


class Authentication:
    """`principal` is for one event loop. `configured`: whether requests need a credential."""

    def __init__(self, settings: AccessSettings) -> None:
        """Read nothing yet; `open` does."""
        self.settings = settings
        self.configured = settings.configured
        self._keys = None if settings.keys is None else KeyRing(settings.keys)
        self._tokens = None if settings.jwt is None else _tokens(settings.jwt)
        self._fetching: asyncio.Future[None] | None = None

    def open(self) -> None:
        """Raises AccessUnusable for a file that cannot be used."""
        if self._keys is not None:
            self._keys.open()
        if self._tokens is not None:
            self._tokens.keys.open()

    def check(self, *, everything: bool = False) -> str | None:
        """Return why no caller can be authenticated, or None. With `everything`, both keys and tokens must work. May
        wait for the issuer."""
        if self._keys is not None:
            self._keys.refresh()
            if self._keys.fault is not None or not everything:
                return self._keys.fault
        if self._tokens is None:
            return None
        keys = self._tokens.keys
        if not keys.believed and keys.due():
            keys.fetch()
        return None if keys.believed else keys.fault

    def described(self) -> str:
        """Return one line for doctor."""
        parts = [] if self._keys is None else [self._keys.described()]
        if self.settings.jwt is not None:
            parts.append(f"tokens of {self.settings.jwt.issuer}, whose keys are available")
        return "; ".join(parts)

    async def principal(self, credential: str) -> Principal:
        """Return the principal of this credential. Waits only while the issuer's keys are fetched. Raises
        Unauthenticated, and IssuerAway when the token cannot be checked."""
        if self._keys is not None and (credential.startswith(PREFIX) or self._tokens is None):
            return self._keys.principal(credential)
        if self._tokens is None:
            raise Unauthenticated("API keys are not taken here", "unknown_key")
        return await self._of_token(self._tokens, credential)

    async def _of_token(self, tokens: Tokens, token: str) -> Principal:
        keys = tokens.keys
        try:
            principal = tokens.principal(token)
        except UnknownKey:
            if keys.due(unknown=True) or self._under_way:
                # Resolving a host name has no timeout of its own.
                await asyncio.wait((self._fetch(keys),), timeout=FETCH_SECONDS + 1)
        else:
            if keys.due():
                _ = self._fetch(keys)  # in the background: the present keys are still valid
            return principal
        try:
            return tokens.principal(token)
        except UnknownKey:
            if not keys.believed:
                raise IssuerAway(_AWAY) from None
            raise Unauthenticated(
                "the token is signed with a key that its issuer does not publish", "unknown_kid"
            ) from None

    @property
    def _under_way(self) -> bool:
        return self._fetching is not None and not self._fetching.done()

    def _fetch(self, keys: KeySet) -> asyncio.Future[None]:
        """Fetch in a thread; concurrent callers share one fetch."""
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.get_running_loop().create_future()
            # A daemon, because a hanging name lookup must not delay the end of the process; and its own thread, because
            # those for requests may all wait for HANA.
            threading.Thread(target=_fetch, args=(keys, self._fetching), name="owl-sap-jwks", daemon=True).start()
        return self._fetching


def _fetch(keys: KeySet, fetching: asyncio.Future[None]) -> None:
    def ended() -> None:
        if not fetching.done():
            fetching.set_result(None)

    try:
        keys.fetch()
    finally:
        with suppress(RuntimeError):  # the service has ended
            fetching.get_loop().call_soon_threadsafe(ended)


def _tokens(settings: JwtSettings) -> Tokens:
    rules = token_rules(settings)
    source = Address(rules.jwks_url or "") if settings.jwks_path is None else File(settings.jwks_path)
    return Tokens(rules, KeySet(source, settings.algorithms), settings.algorithms, settings.leeway)

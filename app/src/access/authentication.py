"""A credential to its principal, by API keys and by tokens. Knows no HTTP framework; never shows what it was given."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from app.src.access.jwks import FETCH_SECONDS, Address, File, KeySet
from app.src.access.keys import PREFIX, KeyRing
from app.src.access.principal import IssuerAway, Principal, Unauthenticated
from app.src.access.tokens import Tokens, UnknownKey, token_rules
from app.src.settings import AccessSettings, JwtSettings

_AWAY = "the keys of the tokens' issuer cannot be had now, so no token can be checked; try again soon"


class Authentication:
    """`principal` is for one event loop. `configured`: does anybody have to say who they are?"""

    def __init__(self, settings: AccessSettings) -> None:
        """Reads nothing yet: `open` does."""
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
        """What is wrong with the keys now; None: somebody can be let in, or with `everything` both by keys and by
        tokens. May wait for the issuer, as whoever brings a token would have to."""
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
        """One line for doctor."""
        told = [] if self._keys is None else [self._keys.described()]
        if self.settings.jwt is not None:
            told.append(f"tokens of {self.settings.jwt.issuer}, whose keys can be had")
        return "; ".join(told)

    async def principal(self, credential: str) -> Principal:
        """Who has this credential. Waits only when the issuer's keys have to be fetched. Raises Unauthenticated, and
        IssuerAway when nobody can tell."""
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
                # Looking a name up has no bound of its own.
                await asyncio.wait((self._fetch(keys),), timeout=FETCH_SECONDS + 1)
        else:
            if keys.due():
                _ = self._fetch(keys)  # nobody waits: those in hand are good meanwhile
            return principal
        try:
            return tokens.principal(token)
        except UnknownKey:
            if not keys.believed:
                raise IssuerAway(_AWAY) from None
            raise Unauthenticated(
                "the token is signed with a key that its issuer does not show", "unknown_kid"
            ) from None

    @property
    def _under_way(self) -> bool:
        return self._fetching is not None and not self._fetching.done()

    def _fetch(self, keys: KeySet) -> asyncio.Future[None]:
        """In a thread, one at a time, however many wait for it."""
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.get_running_loop().create_future()
            # A daemon: a look-up of a name that hangs must not hold the end of the process up. And none of those that
            # serve requests, which may all wait for HANA.
            threading.Thread(target=_fetch, args=(keys, self._fetching), name="owl-sap-jwks", daemon=True).start()
        return self._fetching


def _fetch(keys: KeySet, fetching: asyncio.Future[None]) -> None:
    def ended() -> None:
        if not fetching.done():
            fetching.set_result(None)

    try:
        keys.fetch()
    finally:
        with suppress(RuntimeError):  # the service has ended meanwhile
            fetching.get_loop().call_soon_threadsafe(ended)


def _tokens(settings: JwtSettings) -> Tokens:
    rules = token_rules(settings)
    source = Address(rules.jwks_url or "") if settings.jwks_path is None else File(settings.jwks_path)
    return Tokens(rules, KeySet(source, settings.algorithms), settings.algorithms, settings.leeway)

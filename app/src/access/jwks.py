"""The token issuer's public keys, from one configured address or file. Look-ups use memory; only `fetch` waits.

PyJWT's own client is not used: it takes proxies from the environment, does not limit the answer's length, and drops its
keys while the issuer is unreachable.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from jwt import PyJWK
from jwt.exceptions import PyJWTError

from app.src.access.files import edition
from app.src.access.principal import AccessUnusable

FETCH_SECONDS = 5.0  # for the connection and for each read; a caller waits a second longer for the whole answer
_MOST_BYTES = 256 << 10
_MOST_KEYS = 100
LIFESPAN = 600.0  # seconds after which keys are fetched again; they stay valid meanwhile
# Seconds that keys stay valid while the issuer does not answer. Then tokens are rejected.
LONGEST = 3600.0
# Seconds between two fetches, so that tokens with unknown keys cannot flood the issuer with requests.
COOLDOWN = 30.0
RETRY = 5.0  # the same, while no valid key is cached
_LOOK_AGAIN = 0.5  # least seconds between two checks of the file
_PUBLIC = ("kty", "crv", "n", "e", "x", "y", "kid")
_log = logging.getLogger(__name__)
Keys = Mapping[tuple[str, str], PyJWK]  # by key id and algorithm


class NotHad(Exception):
    """The keys could not be read; the message says why and contains nothing secret."""


def download(url: str, seconds: float = FETCH_SECONDS) -> bytes:
    """Return the answer to one request, without redirects and proxies. Raises NotHad."""
    parts = urlsplit(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        with closing(connect(parts.hostname or "", parts.port, timeout=seconds)) as connection:
            connection.request("GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise NotHad(f"it answered with HTTP {answer.status}; redirects are not followed")
            content = answer.read(_MOST_BYTES + 1)
    except (OSError, UnicodeError, http.client.HTTPException) as error:  # UnicodeError: an invalid host name
        why = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
        raise NotHad(f"it cannot be reached, or did not answer within {seconds:g} s ({why})") from None
    return content


def parse(content: bytes, algorithms: Sequence[str]) -> Keys:
    """Return the keys with a kid for these algorithms. Raises NotHad for an invalid key set."""
    if len(content) > _MOST_BYTES:
        raise NotHad(f"it has more than {_MOST_BYTES >> 10} KiB")
    try:
        entries = json.loads(content)["keys"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise NotHad('its content is not a key set (JSON with "keys")') from None
    if not isinstance(entries, list) or len(entries) > _MOST_KEYS:
        raise NotHad(f'"keys" is not a list of at most {_MOST_KEYS}')
    keys: dict[tuple[str, str], PyJWK] = {}
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("kid"), str) or entry.get("use", "sig") != "sig":
            continue
        operations = entry.get("key_ops", ["verify"])
        if not isinstance(operations, list) or "verify" not in operations:
            continue
        public = {name: entry[name] for name in _PUBLIC if name in entry}
        for algorithm in algorithms:
            if entry.get("alg", algorithm) != algorithm:
                continue
            try:
                keys.setdefault((entry["kid"], algorithm), PyJWK(public, algorithm))
            except (PyJWTError, ValueError, TypeError):  # a key of another type
                continue
    return keys


class KeySet:
    """The cached keys of an address or a file, and when to fetch them next. `fault`: the reason for the missing keys or
    the failed fetch. Thread-safe."""

    def __init__(self, source: str | Path, algorithms: Sequence[str]) -> None:
        self.source = source
        self._algorithms = tuple(algorithms)
        self._keys: Keys = {}
        self._had = self._tried = self._looked = float("-inf")
        self._seen: tuple[int, ...] | None = None
        self._fetching, self._starting = threading.Lock(), threading.Lock()
        self._refreshing: Future[None] | None = None
        self.fault: str | None = None

    @property
    def believed(self) -> bool:
        """Return whether there are keys that are recent enough."""
        return bool(self._keys) and time.monotonic() - self._had < LONGEST

    def get(self, kid: str, algorithm: str) -> PyJWK | None:
        return self._keys.get((kid, algorithm)) if self.believed else None

    def due(self, *, unknown: bool = False) -> bool:
        """Return whether to fetch now. `unknown`: for a token whose key is not cached."""
        now = time.monotonic()
        if isinstance(self.source, Path) and now - self._looked >= _LOOK_AGAIN:
            self._looked = now
            if edition(self.source) != self._seen:
                return True
        wanted = unknown or not self.believed or now - self._had >= LIFESPAN
        return wanted and now - self._tried >= (COOLDOWN if self.believed else RETRY)

    def open(self) -> None:
        """Read a file now, so that an invalid one stops the start. An address is fetched when needed. Raises
        AccessUnusable."""
        if isinstance(self.source, Path):
            self.fetch()
            if self.fault is not None:
                raise AccessUnusable(f"{self.fault} (setting access.jwt.jwks_path)")

    @property
    def under_way(self) -> bool:
        return self._refreshing is not None and not self._refreshing.done()

    def refresh(self) -> Future[None]:
        """Fetch in a thread; concurrent callers share one fetch."""
        with self._starting:
            if self._refreshing is None or self._refreshing.done():
                self._refreshing = Future()
                # A daemon, because a name look-up that hangs must not delay the end of the process. Its own thread,
                # because all request threads may wait for HANA.
                threading.Thread(target=self._work, args=(self._refreshing,), name="owl-sap-jwks", daemon=True).start()
            return self._refreshing

    def _work(self, done: Future[None]) -> None:
        try:
            self.fetch()
        finally:
            done.set_result(None)

    def fetch(self) -> None:
        """Fetch the keys and wait for them. A failure keeps the cached keys and sets `fault`; a set without keys
        removes them."""
        with self._fetching:
            fault = None
            try:
                self._keys = parse(self._read(), self._algorithms)
                self._had = time.monotonic()
                if not self._keys:  # the issuer has withdrawn the last one
                    fault = f"no key with a kid signs with {', '.join(self._algorithms)}"
            except NotHad as error:
                fault = str(error)
            if fault is not None:
                fault = f"{self.source}: the issuer's keys are unavailable: {fault}"
                if fault != self.fault:  # log once, not at each attempt
                    _log.warning("%s", fault)
            self.fault, self._tried = fault, time.monotonic()

    def _read(self) -> bytes:
        if isinstance(self.source, str):
            return download(self.source)
        self._seen = edition(self.source)
        try:
            with self.source.open("rb") as file:
                return file.read(_MOST_BYTES + 1)
        except OSError as error:
            self._seen = None  # the file itself may be fine and not change again
            raise NotHad(f"cannot be read ({error.strerror})") from None

"""The public keys of the tokens' issuer, from one configured address or file and from nowhere else. What is asked of
memory never waits; `fetch` waits, for a bounded time. Knows no token.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

from jwt import PyJWK
from jwt.exceptions import PyJWTError

from app.src.access.files import edition
from app.src.access.principal import AccessUnusable

FETCH_SECONDS = 5.0
"""For everything: looking the name up aside, an issuer that has not answered whole by then has not answered."""
_MOST_BYTES = 256 << 10
_MOST_KEYS = 100
LIFESPAN = 600.0
"""Seconds after which keys are fetched anew, while those in hand are still believed."""
LONGEST = 3600.0
"""Seconds that keys are believed while the issuer does not answer. Then nobody can tell, and nobody is let in."""
COOLDOWN = 30.0
"""Seconds between two fetches, whatever keys tokens name: strangers must not make us ask the issuer all the time."""
RETRY = 5.0
"""The same while there are no keys to believe, so that nobody is let in."""
_FITS: Mapping[str, tuple[str, str | None]] = {
    **{name: ("RSA", None) for name in ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")},
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}
"""Which keys an algorithm takes: kty, crv."""
_LOOK_AGAIN = 0.5
"""Seconds at least between two looks at whether the file has changed."""
LOOKS = 3
"""At a file that cannot be used, before that ends the start."""
_LEAST_RSA_BITS = 2048
_log = logging.getLogger(__name__)
Keys = Mapping[tuple[str, str], PyJWK]
"""By the key's id and the algorithm it is used with."""


class NotHad(Exception):
    """The keys did not come; the message says why and holds nothing secret."""


class NoKeys(NotHad):
    """They came, and none of them signs for us: whoever took the last one away means that none is good any more."""


class Source(Protocol):
    """Where keys come from. `read` may wait, and raises NotHad."""

    name: str

    def read(self) -> bytes: ...

    def changed(self) -> bool:
        """Does looking again promise anything new? Costs next to nothing."""
        ...


class Address:
    """Over HTTPS, or HTTP on loopback: one request, no redirect, no proxy, so many bytes, so many seconds."""

    def __init__(self, url: str, seconds: float = FETCH_SECONDS) -> None:
        self.name = url
        self._parts = urlsplit(url)
        self._seconds = seconds

    def changed(self) -> bool:
        return False

    def read(self) -> bytes:
        try:
            with _bounded(self._parts, self._seconds) as connection:
                return self._answer(connection)
        except (OSError, UnicodeError, http.client.HTTPException) as error:  # UnicodeError: a name that cannot be one
            why = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
            raise NotHad(f"it cannot be reached, or did not answer in {self._seconds:g} s ({why})") from None

    def _answer(self, connection: http.client.HTTPConnection) -> bytes:
        path = self._parts.path or "/"
        connection.request("GET", f"{path}?{self._parts.query}" if self._parts.query else path)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise NotHad(f"it answered with HTTP {answer.status}; redirects are not followed")
        content = answer.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise NotHad(f"it sent more than {_MOST_BYTES >> 10} KiB")
        if answer.length:
            raise NotHad(f"its answer broke off, or did not come whole in {self._seconds:g} s")
        return content


@contextmanager
def _bounded(parts: SplitResult, seconds: float) -> Iterator[http.client.HTTPConnection]:
    """A connection that ends by then, whatever its other side does. The timeout of a socket is that of one read: one
    that gives a byte now and then would never end."""
    encrypted = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if encrypted else 80)
    wire = socket.create_connection((host, port), timeout=seconds)
    if encrypted:
        context = ssl.create_default_context()
        wire = context.wrap_socket(wire, server_hostname=host, do_handshake_on_connect=False)
    watchdog = threading.Timer(seconds, _cut, (wire,))
    watchdog.daemon = True
    watchdog.start()
    try:
        if isinstance(wire, ssl.SSLSocket):
            wire.do_handshake()
        connection = http.client.HTTPConnection(host, port)
        connection.sock = wire
        yield connection
    finally:
        watchdog.cancel()
        wire.close()


def _cut(wire: socket.socket) -> None:
    """Ends a read that is under way in another thread. Not the method of TLS's own socket, which would let that thread
    go on without TLS."""
    with suppress(OSError):
        socket.socket.shutdown(wire, socket.SHUT_RDWR)


class File:
    """A file that somebody else keeps up to date."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._seen: tuple[int, ...] | None = None
        self._looked = float("-inf")

    def changed(self) -> bool:
        now = time.monotonic()
        if now - self._looked < _LOOK_AGAIN:
            return False
        self._looked = now
        return edition(self._path) != self._seen

    def read(self) -> bytes:
        self._seen = edition(self._path)
        try:
            with self._path.open("rb") as file:
                content = file.read(_MOST_BYTES + 1)
        except OSError as error:
            self._seen = None  # nothing may be wrong with the file itself, which then does not change
            raise NotHad(f"it cannot be read ({error.strerror})") from None
        if len(content) > _MOST_BYTES:
            raise NotHad(f"it has more than {_MOST_BYTES >> 10} KiB")
        return content


def parse(content: bytes, algorithms: Sequence[str]) -> Keys:
    """Those that sign, with a kid, for these algorithms; others are passed over. Raises NoKeys when none is left,
    NotHad for what is no key set."""
    try:
        document = json.loads(content)
        entries = document["keys"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise NotHad('what it sent is no key set (JSON with "keys")') from None
    if not isinstance(entries, list) or len(entries) > _MOST_KEYS:
        raise NotHad(f'"keys" is no list of at most {_MOST_KEYS}')
    keys: dict[tuple[str, str], PyJWK] = {}
    for entry in entries:
        for algorithm in algorithms:
            key = _usable(entry, algorithm)
            if key is not None:
                keys.setdefault((entry["kid"], algorithm), key)
    if not keys:
        raise NoKeys(f"it has no key with a kid that signs with {', '.join(algorithms)}")
    return keys


def _usable(entry: Any, algorithm: str) -> PyJWK | None:
    """The entry as a key for this algorithm, if its type, its curve and its own words on its use allow that."""
    if not isinstance(entry, dict) or not isinstance(entry.get("kid"), str):
        return None
    kind, curve = _FITS[algorithm]
    if entry.get("kty") != kind or (curve is not None and entry.get("crv") != curve):
        return None
    if entry.get("use", "sig") != "sig" or entry.get("alg", algorithm) != algorithm:
        return None
    operations = entry.get("key_ops", ["verify"])
    if not isinstance(operations, list) or "verify" not in operations:
        return None
    public = {name: value for name, value in entry.items() if name in ("kty", "crv", "n", "e", "x", "y", "kid")}
    try:
        key = PyJWK(public, algorithm)
    except (PyJWTError, ValueError, TypeError):
        return None
    return None if getattr(key.key, "key_size", _LEAST_RSA_BITS) < _LEAST_RSA_BITS and kind == "RSA" else key


class KeySet:
    """The keys in hand, and when to get others. Thread-safe."""

    def __init__(self, source: Source, algorithms: Sequence[str]) -> None:
        self._source = source
        self._algorithms = tuple(algorithms)
        self._keys: Keys = {}
        self._digest = b""
        self._had = self._tried = float("-inf")
        self._fetching = threading.Lock()
        self.generation = 0
        """Rises whenever other keys are had: what was believed by the former ones is to be asked again."""
        self.fault: str | None = None
        """Why the last fetch failed; None: it did not, or there was none."""

    @property
    def believed(self) -> bool:
        """Are there keys that are young enough?"""
        return bool(self._keys) and time.monotonic() - self._had < LONGEST

    def get(self, kid: str, algorithm: str) -> PyJWK | None:
        return self._keys.get((kid, algorithm)) if self.believed else None

    def knows(self, kid: str) -> bool:
        """With any algorithm."""
        return self.believed and any(known == kid for known, _ in self._keys)

    def due(self, *, unknown: bool = False) -> bool:
        """Is it time to fetch? `unknown`: for a token by a key that is not among these."""
        if self._source.changed():
            return True
        now = time.monotonic()
        wanted = unknown or not self.believed or now - self._had >= LIFESPAN
        return wanted and now - self._tried >= (COOLDOWN if self.believed else RETRY)

    def open(self) -> None:
        """Read a file now, so that a wrong one ends the start: wrong still after a moment, for whoever keeps it up to
        date may just be writing it. An address may be away, and is asked when needed. Raises AccessUnusable."""
        if isinstance(self._source, File):
            self.fetch()
            for _ in range(LOOKS - 1):
                if self.fault is None:
                    return
                time.sleep(_LOOK_AGAIN)
                self.fetch()
            if self.fault is not None:
                raise AccessUnusable(f"{self.fault} (setting access.jwt.jwks_path)")

    def fetch(self) -> None:
        """Waits for the issuer. What fails leaves the keys in hand, and a `fault`; a set without any takes them
        away."""
        with self._fetching:
            try:
                content = self._source.read()
                keys = parse(content, self._algorithms)
            except NotHad as error:
                fault = f"{self._source.name}: the issuer's keys cannot be had: {error}"
                if fault != self.fault:  # once, and not at each look
                    _log.warning("%s", fault)
                self.fault = fault
                if isinstance(error, NoKeys):
                    self._keys, self._digest = {}, b""
            else:
                digest = hashlib.sha256(content).digest()
                others = digest != self._digest  # nosemgrep: owl-access-compared - of public keys
                self._keys, self._digest, self.fault = keys, digest, None
                self._had = time.monotonic()
                # Last: what is checked meanwhile must never count as checked with these.
                self.generation += others
            finally:
                self._tried = time.monotonic()

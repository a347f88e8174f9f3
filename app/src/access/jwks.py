"""The public keys of the token issuer, from one configured address or file only. Lookups use memory; `fetch` waits, for
a bounded time.
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

# For the whole answer of the issuer, without the name lookup.
FETCH_SECONDS = 5.0
_MOST_BYTES = 256 << 10
_MOST_KEYS = 100
LIFESPAN = 600.0  # seconds after which keys are fetched again; the present ones stay valid until then
# Seconds that keys stay valid while the issuer does not answer. After that, tokens are rejected.
LONGEST = 3600.0
# Seconds between two fetches, so that tokens with unknown keys cannot make us flood the issuer.
COOLDOWN = 30.0
RETRY = 5.0  # the same, as long as no valid key is cached
# Which keys an algorithm takes: kty, crv.
_FITS: Mapping[str, tuple[str, str | None]] = {
    **{name: ("RSA", None) for name in ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")},
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}
_LOOK_AGAIN = 0.5  # least seconds between two checks of the file
LOOKS = 3  # attempts at an unusable file before the start fails
_LEAST_RSA_BITS = 2048
_log = logging.getLogger(__name__)
Keys = Mapping[tuple[str, str], PyJWK]  # by the key's id and the algorithm it is used with


class NotHad(Exception):
    """The keys could not be read; the message says why and holds nothing secret."""


class NoKeys(NotHad):
    """The key set is readable and has no usable key: the issuer has withdrawn the last one."""


class Source(Protocol):
    """The address or file of the keys. `read` may wait, and raises NotHad."""

    name: str

    def read(self) -> bytes: ...

    def changed(self) -> bool:
        """Return whether reading again may give something new. Cheap."""
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
            raise NotHad(f"it cannot be reached, or did not answer within {self._seconds:g} s ({why})") from None

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
            raise NotHad(f"its answer broke off, or was incomplete after {self._seconds:g} s")
        return content


@contextmanager
def _bounded(parts: SplitResult, seconds: float) -> Iterator[http.client.HTTPConnection]:
    """Open a connection that ends after `seconds`. A socket's timeout is per read, so a server that
    sends a byte now and then would never end."""
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
    """End a read in another thread. The TLS socket's own method would let that thread continue without TLS."""
    with suppress(OSError):
        socket.socket.shutdown(wire, socket.SHUT_RDWR)


class File:
    """A file that another program keeps up to date."""

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
            self._seen = None  # the file itself may be fine and not change again
            raise NotHad(f"cannot be read ({error.strerror})") from None
        if len(content) > _MOST_BYTES:
            raise NotHad(f"it has more than {_MOST_BYTES >> 10} KiB")
        return content


def parse(content: bytes, algorithms: Sequence[str]) -> Keys:
    """Return the keys with a kid that sign with these algorithms. Raises NoKeys if there is none, NotHad for an invalid
    key set."""
    try:
        document = json.loads(content)
        entries = document["keys"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise NotHad('its content is not a key set (JSON with "keys")') from None
    if not isinstance(entries, list) or len(entries) > _MOST_KEYS:
        raise NotHad(f'"keys" is not a list of at most {_MOST_KEYS}')
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
    """Return the entry as a key for this algorithm if its type, curve and declared use fit."""
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
    """The present keys, and when to fetch others. Thread-safe."""

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
        """Return whether there are keys, and they are recent enough."""
        return bool(self._keys) and time.monotonic() - self._had < LONGEST

    def get(self, kid: str, algorithm: str) -> PyJWK | None:
        return self._keys.get((kid, algorithm)) if self.believed else None

    def knows(self, kid: str) -> bool:
        """With any algorithm."""
        return self.believed and any(known == kid for known, _ in self._keys)

    def due(self, *, unknown: bool = False) -> bool:
        """Return whether to fetch now; `unknown`: for a token whose key is not among these."""
        if self._source.changed():
            return True
        now = time.monotonic()
        wanted = unknown or not self.believed or now - self._had >= LIFESPAN
        return wanted and now - self._tried >= (COOLDOWN if self.believed else RETRY)

    def open(self) -> None:
        """Read a file now, so that an invalid one ends the start; retry, because it may just be being written. An
        address is asked when needed. Raises AccessUnusable."""
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
        """Fetch the keys, waiting for the issuer. A failure keeps the present keys and sets `fault`; a set without
        keys removes them."""
        with self._fetching:
            try:
                content = self._source.read()
                keys = parse(content, self._algorithms)
            except NotHad as error:
                fault = f"{self._source.name}: the issuer's keys are unavailable: {error}"
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
                # Last, so that a token checked during the fetch does not count as checked with these keys.
                self.generation += others
            finally:
                self._tried = time.monotonic()

"""Verify tokens (JWT) of the configured issuer, including SAP's issuers, with its public keys from one configured
address or file. PyJWT checks signature, times, issuer and audience; this module checks the rest. Only `fetch` waits.

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
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jwt
from jwt import exceptions as faults
from jwt.exceptions import PyJWTError

from app.src.access import files
from app.src.access.principal import SCOPES, AccessUnusable, Principal, Unauthenticated
from app.src.settings.model import JwtSettings

_log = logging.getLogger(__name__)
_MOST_BYTES = 256 << 10
_MOST_KEYS = 100
LIFESPAN = 600.0  # seconds after which keys are fetched again, while the cached ones stay valid
# Seconds that cached keys stay valid while the issuer does not answer. After that, tokens are rejected.
LONGEST = 3600.0
# Minimum seconds between two fetches, so that tokens with unknown keys cannot flood the issuer with requests.
COOLDOWN = 30.0
RETRY = 5.0  # the same, while no valid key is cached
Keys = Mapping[tuple[str, str], jwt.PyJWK]  # by key id and algorithm


def download(url: str, seconds: float = JwtSettings.fetch_seconds) -> bytes:
    """Return the body that a GET request receives, without redirects and proxies. Raises AccessUnusable."""
    parts = urlsplit(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    port = parts.port or connect.default_port  # without one, part of an IPv6 address would be taken for it
    try:
        with closing(connect(parts.hostname or "", port, timeout=seconds)) as connection:
            connection.request("GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise AccessUnusable(f"it answered with HTTP {answer.status}; redirects are not followed")
            content = answer.read(_MOST_BYTES + 1)
    except (OSError, UnicodeError, http.client.HTTPException) as error:  # UnicodeError: an invalid host name
        why = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
        raise AccessUnusable(f"it cannot be reached, or did not answer within {seconds:g} s ({why})") from None
    return content


def parse(content: bytes, algorithms: Sequence[str]) -> Keys:
    """Return the keys that have a kid and fit these algorithms. Raises AccessUnusable for an invalid key set."""
    if len(content) > _MOST_BYTES:
        raise AccessUnusable(f"it has more than {_MOST_BYTES >> 10} KiB")
    try:
        entries = json.loads(content)["keys"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise AccessUnusable('its content is not a key set (JSON with "keys")') from None
    if not isinstance(entries, list) or len(entries) > _MOST_KEYS:
        raise AccessUnusable(f'"keys" is not a list of at most {_MOST_KEYS}')
    keys: dict[tuple[str, str], jwt.PyJWK] = {}
    for entry in entries:
        named = isinstance(entry, dict) and isinstance(entry.get("kid"), str) and entry.get("use", "sig") == "sig"
        operations = entry.get("key_ops", ["verify"]) if named else None
        if not isinstance(operations, list) or "verify" not in operations:
            continue
        public = {name: entry[name] for name in ("kty", "crv", "n", "e", "x", "y", "kid") if name in entry}
        for algorithm in algorithms:
            if entry.get("alg", algorithm) != algorithm:
                continue
            with suppress(PyJWTError, ValueError, TypeError):  # a key of another type
                keys.setdefault((entry["kid"], algorithm), jwt.PyJWK(public, algorithm))
    return keys


class KeySet:
    """The cached keys of an address or a file. `fault`: why the last fetch failed or found no keys. Thread-safe."""

    def __init__(self, source: str | Path, algorithms: Sequence[str]) -> None:
        self.source = source
        self._algorithms = tuple(algorithms)
        self._keys: Keys = {}
        self._had = self._tried = self._looked = float("-inf")
        self._seen: tuple[int, ...] | None = None
        self._starting = threading.Lock()
        self._refreshing: Future[None] | None = None
        self.fault: str | None = None

    @property
    def believed(self) -> bool:
        """Return whether keys are cached and recent enough to use."""
        return bool(self._keys) and time.monotonic() - self._had < LONGEST

    def get(self, kid: str, algorithm: str) -> jwt.PyJWK | None:
        return self._keys.get((kid, algorithm)) if self.believed else None

    def due(self, *, unknown: bool = False) -> bool:
        """Return whether to fetch now. `unknown`: for a token whose key is not cached."""
        now = time.monotonic()
        if self._refreshing is not None and not self._refreshing.done():
            return True
        if isinstance(self.source, Path) and now - self._looked >= files.LOOK_SECONDS:
            self._looked = now
            if files.edition(self.source) != self._seen:
                return True
        wanted = unknown or not self.believed or now - self._had >= LIFESPAN
        return wanted and now - self._tried >= (COOLDOWN if self.believed else RETRY)

    def open(self) -> None:
        """Read a key file now, so that an invalid one prevents the start. Raises AccessUnusable."""
        if isinstance(self.source, Path):
            self.fetch()
            if self.fault is not None:
                raise AccessUnusable(f"{self.fault} (setting access.jwt.jwks_path)")

    def refresh(self) -> Future[None]:
        """Fetch in a thread; concurrent callers share one fetch."""
        with self._starting:
            if self._refreshing is None or self._refreshing.done():
                self._refreshing = Future()
                # A daemon, because a hanging name look-up must not delay the end of the process. A separate thread,
                # because all request threads may wait for HANA.
                threading.Thread(target=self.fetch, args=(self._refreshing,), name="owl-sap-jwks", daemon=True).start()
            return self._refreshing

    def fetch(self, done: Future[None] | None = None) -> None:
        """Fetch the keys and wait. A failure keeps the cached keys and sets `fault`; an empty set removes them."""
        fault = None
        try:
            self._keys = parse(self._read(), self._algorithms)
            self._had = time.monotonic()
            if not self._keys:  # the issuer has withdrawn its last key
                fault = f"no key with a kid signs with {', '.join(self._algorithms)}"
        except AccessUnusable as error:
            fault = str(error)
        finally:
            if fault is not None:
                fault = f"{self.source}: the issuer's keys are unavailable: {fault}"
                if fault != self.fault:  # log once, not at each attempt
                    _log.warning("%s", fault)
            self.fault, self._tried = fault, time.monotonic()
            if done is not None:
                done.set_result(None)

    def _read(self) -> bytes:
        if isinstance(self.source, str):
            return download(self.source)
        self._seen = files.edition(self.source)
        try:
            with self.source.open("rb") as file:
                return file.read(_MOST_BYTES + 1)
        except OSError as error:
            self._seen = None  # read again next time: the file may be valid and never change
            raise AccessUnusable(f"cannot be read ({error.strerror})") from None


_ATTRIBUTES = "xs.user.attributes"
# In characters. XSUAA tokens with many attributes approach 8 KiB.
LONGEST_TOKEN = 16 << 10
# Values of the header typ for access tokens; a token without typ is accepted.
_KINDS = ("jwt", "at+jwt", "application/at+jwt")
_WHY: tuple[tuple[type[PyJWTError], str, str], ...] = (
    (faults.ExpiredSignatureError, "the token has expired", "expired_token"),
    (faults.ImmatureSignatureError, "the token is not valid yet", "early_token"),
    (faults.InvalidIssuedAtError, "the token was issued in the future, or its iat is invalid", "early_token"),
    (faults.InvalidAudienceError, "the token is for another audience", "audience"),
    (faults.InvalidIssuerError, "the token is of another issuer", "issuer"),
    (faults.MissingRequiredClaimError, "the token lacks one of the claims iss, aud and exp", "incomplete_token"),
    (faults.InvalidAlgorithmError, "the token's algorithm does not fit its key", "algorithm"),
    (faults.InvalidKeyError, "the token's key is too short, or does not fit its algorithm", "algorithm"),
    (faults.InvalidSignatureError, "the token's signature is wrong", "signature"),
)
_MALFORMED = ("neither an API key nor a token", "malformed_token")


class Tokens:
    """Verifies tokens of the configured issuer with its `keys`. Thread-safe."""

    def __init__(self, settings: JwtSettings) -> None:
        self._settings = settings
        self._issuer, self._audience = settings.issuer or "", settings.audience
        self._scope_claim = settings.scope_claim or "scope"
        self._scopes = settings.scopes or {scope: scope for scope in SCOPES}
        # The first of these claims that a token contains must equal the configured tenant.
        self._tenants: tuple[str, ...] = () if settings.tenant_claim is None else (settings.tenant_claim,)
        url = settings.jwks_url
        if settings.preset == "xsuaa":
            base = self._issuer.rstrip("/").removesuffix("/oauth/token")
            self._issuer, url = f"{base}/oauth/token", url or f"{base}/token_keys"
            self._audience = self._audience or (settings.xs_appname or "",)
            before = f"{settings.xs_appname}."  # scopes with another prefix belong to other applications
            self._scopes = {before + name.removeprefix(before): meaning for name, meaning in self._scopes.items()}
            self._tenants = self._tenants or ("zid",)
        elif settings.preset == "ias":
            self._issuer = self._issuer.rstrip("/")
            url = url or f"{self._issuer}/oauth2/certs"
            self._scope_claim = settings.scope_claim or "groups"
            self._tenants = self._tenants or ("app_tid", "zone_uuid")
        self.keys = KeySet(settings.jwks_path or url or "", settings.algorithms)

    def principal(self, token: str) -> Principal | None:
        """Return the principal of a token; None: its key is unknown and may be new. Raises Unauthenticated."""
        if len(token) > LONGEST_TOKEN:
            raise Unauthenticated(f"the token is longer than {LONGEST_TOKEN} characters", "malformed_token")
        # The unverified header. Key locations in it (jku, x5u, jwk, x5c) are ignored: the address is configured.
        try:
            header = jwt.get_unverified_header(token)
        except (PyJWTError, ValueError, RecursionError):
            raise Unauthenticated(*_MALFORMED) from None
        if "crit" in header:
            raise Unauthenticated("the token requires unknown extensions (crit)", "malformed_token")
        kind = header.get("typ", _KINDS[0])
        if not isinstance(kind, str) or kind.lower() not in _KINDS:
            raise Unauthenticated("the token is not an access token (typ)", "malformed_token")
        kid, algorithm = header.get("kid"), header.get("alg")
        if algorithm not in self._settings.algorithms:
            raise Unauthenticated("the token's algorithm is not among those allowed", "algorithm")
        if not isinstance(kid, str) or not 0 < len(kid) <= 256:
            raise Unauthenticated("the token names no key (kid)", "malformed_token")
        key = self.keys.get(kid, algorithm)
        if key is None:
            return None
        try:
            payload = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=list(self._audience),
                issuer=self._issuer,
                leeway=self._settings.leeway,
                options={"require": ["exp", "iss", "aud"], "enforce_minimum_key_length": True},
            )
        except PyJWTError as error:
            why = next((why for kind, *why in _WHY if isinstance(error, kind)), _MALFORMED)
            raise Unauthenticated(*why) from None
        except (ValueError, TypeError, OverflowError):
            raise Unauthenticated(*_MALFORMED) from None
        return self._principal(payload)

    def _principal(self, payload: Mapping[str, Any]) -> Principal:
        tenant = self._settings.tenant
        if tenant is not None:
            named = next((payload[claim] for claim in self._tenants if claim in payload), None)
            if named != tenant:
                raise Unauthenticated("the token is of another tenant", "tenant")
        subject = payload.get("sub")
        if not isinstance(subject, str) or not 0 < len(subject) <= 200 or not subject.isprintable():
            raise Unauthenticated("the token has no valid subject (sub)", "incomplete_token")
        means = {self._scopes[name] for name in _names(payload, self._scope_claim) if name in self._scopes}
        scopes = frozenset(scope for scope in SCOPES if scope in means)
        claims = payload
        if self._settings.preset == "xsuaa":
            # Row rights name SAP's user attributes at the top level, as `xs.user.attributes.Country`. Newer tokens
            # hold them in ext_cxt. A top-level claim with such a name is dropped: it is not the issuer's attribute.
            inside = payload.get("ext_cxt")
            held = (inside if isinstance(inside, dict) else payload).get(_ATTRIBUTES)
            lifted = {f"{_ATTRIBUTES}.{name}": value for name, value in held.items()} if isinstance(held, dict) else {}
            own = {name: value for name, value in payload.items() if not name.startswith(f"{_ATTRIBUTES}.")}
            claims = own | lifted
        return Principal(subject, scopes, claims, "every_row" in means, credential="token")


def _names(payload: Mapping[str, Any], claim: str) -> list[str]:
    """Return the names in a claim, a list or words in a text. `claim`: its name, with dots or not, or a path a.b."""
    found: Any = payload.get(claim)
    if claim not in payload:
        found = payload
        for part in claim.split("."):
            found = found.get(part) if isinstance(found, dict) else None
    if isinstance(found, str):
        return found.split()
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []

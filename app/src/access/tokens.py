"""Tokens (JWT): verify them for the configured issuer, with what is known of SAP's issuers, and return the principal.
PyJWT checks signature and times; this module checks what it leaves to its users. It never waits."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jwt
from jwt.exceptions import (
    ExpiredSignatureError,
    ImmatureSignatureError,
    InvalidAlgorithmError,
    InvalidAudienceError,
    InvalidIssuedAtError,
    InvalidIssuerError,
    InvalidSignatureError,
    MissingRequiredClaimError,
    PyJWTError,
)

from app.src.access.jwks import KeySet
from app.src.access.principal import SCOPES, Principal, Unauthenticated
from app.src.settings import JwtSettings

EVERY_ROW = "every_row"
_OWN_NAMES = {scope: scope for scope in SCOPES}
_ATTRIBUTES = "xs.user.attributes"


@dataclass(frozen=True, slots=True)
class TokenRules:
    """How an issuer's tokens are read. `issuer`, `audience`: the required iss and one aud. `tenants`: the first of
    these claims that is present must equal `tenant`. `scopes`: names in `scope_claim` and their meaning. `attributes`:
    lift SAP's user attributes to the top, so that row rights can name them."""

    issuer: str
    jwks_url: str | None
    audience: tuple[str, ...]
    scope_claim: str
    scopes: Mapping[str, str]
    subject_claim: str
    tenant: str | None = None
    tenants: tuple[str, ...] = ()
    attributes: bool = False

    def claims(self, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the claims for row rights: the token's, and with `attributes` names such as
        `xs.user.attributes.Country`."""
        if not self.attributes:
            return payload
        # At the top, or in ext_cxt in the newer layout.
        inside = payload.get("ext_cxt")
        held = (inside if isinstance(inside, dict) else payload).get(_ATTRIBUTES)
        lifted = {f"{_ATTRIBUTES}.{name}": value for name, value in held.items()} if isinstance(held, dict) else {}
        # A claim of such a name at the top is not the issuer's attribute.
        return {name: value for name, value in payload.items() if not name.startswith(f"{_ATTRIBUTES}.")} | lifted


def token_rules(settings: JwtSettings) -> TokenRules:
    issuer = settings.issuer or ""
    given: dict[str, Any] = {
        "jwks_url": settings.jwks_url,
        "audience": settings.audience,
        "scopes": settings.scopes or _OWN_NAMES,
        "subject_claim": settings.subject_claim,
        "tenant": settings.tenant,
    }
    tenants = () if settings.tenant_claim is None else (settings.tenant_claim,)
    match settings.preset:
        case "xsuaa":
            return _xsuaa(settings, issuer.rstrip("/").removesuffix("/oauth/token"), given, tenants)
        case "ias":
            base = issuer.rstrip("/")
            return TokenRules(
                **given | {"jwks_url": settings.jwks_url or f"{base}/oauth2/certs"},
                issuer=base,
                scope_claim=settings.scope_claim or "groups",
                tenants=tenants or ("app_tid", "zone_uuid"),
            )
        case None:
            return TokenRules(**given, issuer=issuer, scope_claim=settings.scope_claim or "scope", tenants=tenants)


def _xsuaa(settings: JwtSettings, base: str, given: Mapping[str, Any], tenants: tuple[str, ...]) -> TokenRules:
    """Scopes are named <xsappname>.<name>; others belong to other applications."""
    application = settings.xs_appname or ""
    before = f"{application}."
    scopes = {before + name.removeprefix(before): meaning for name, meaning in given["scopes"].items()}
    return TokenRules(
        **{
            **given,
            "jwks_url": settings.jwks_url or f"{base}/token_keys",
            "audience": settings.audience or (application,),
            "scopes": scopes,
        },
        issuer=f"{base}/oauth/token",
        scope_claim=settings.scope_claim or "scope",
        tenants=tenants or ("zid",),
        attributes=True,
    )


# Characters. XSUAA tokens with many attributes come near 8 KiB.
LONGEST_TOKEN = 16 << 10
_LONGEST_KID = 256
_LONGEST_SUBJECT = 200
# Seconds since 1970 that a JSON number holds exactly; NaN fails both comparisons.
_LAST = 2.0**53
# Values of the header typ of access tokens; without typ a token may be one.
_KINDS = ("jwt", "at+jwt", "application/at+jwt")
_REMEMBERED = 1024
_REMEMBER_SECONDS = 60.0
_WHY: tuple[tuple[type[PyJWTError], str, str], ...] = (
    (ExpiredSignatureError, "the token has expired", "expired_token"),
    (ImmatureSignatureError, "the token is not valid yet", "early_token"),
    (InvalidIssuedAtError, "the token was issued in the future, or its iat is invalid", "early_token"),
    (InvalidAudienceError, "the token is for another audience", "audience"),
    (InvalidIssuerError, "the token is of another issuer", "issuer"),
    (MissingRequiredClaimError, "the token lacks one of the claims iss, aud and exp", "incomplete_token"),
    (InvalidAlgorithmError, "the token's algorithm does not fit its key", "algorithm"),
    (InvalidSignatureError, "the token's signature is wrong", "signature"),
)
_MALFORMED = ("neither an API key nor a token", "malformed_token")


class UnknownKey(Exception):
    """The token names an unknown key; the issuer may have a new one."""


@dataclass(frozen=True, slots=True)
class _Remembered:
    principal: Principal
    until: float
    generation: int


class Tokens:
    """Caches a valid token's principal for a minute, while the issuer's keys stay the same. For the event loop's thread
    only."""

    def __init__(self, rules: TokenRules, keys: KeySet, algorithms: Iterable[str], leeway: float) -> None:
        """`leeway`: seconds that clocks may differ."""
        self._rules = rules
        self.keys = keys
        self._algorithms = tuple(algorithms)
        self._leeway = leeway
        self._remembered: OrderedDict[bytes, _Remembered] = OrderedDict()

    def principal(self, token: str) -> Principal:
        """Raises Unauthenticated and UnknownKey."""
        if len(token) > LONGEST_TOKEN:
            raise Unauthenticated(f"the token is longer than {LONGEST_TOKEN} characters", "malformed_token")
        digest = hashlib.sha256(token.encode()).digest()
        known = self._remembered.get(digest)
        if known is not None and known.until > time.time() and known.generation == self.keys.generation:
            if not self.keys.believed:
                raise UnknownKey
            return known.principal
        generation = self.keys.generation
        payload = self._checked(token)
        principal = self._principal(payload)
        until = min(time.time() + _REMEMBER_SECONDS, float(payload["exp"]) + self._leeway)
        self._remembered[digest] = _Remembered(principal, until, generation)
        self._remembered.move_to_end(digest)
        while len(self._remembered) > _REMEMBERED:
            self._remembered.popitem(last=False)
        return principal

    def _checked(self, token: str) -> Mapping[str, Any]:
        header = self._header(token)
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in self._algorithms:
            raise Unauthenticated("the token's algorithm is not among those allowed", "algorithm")
        if not isinstance(kid, str) or not 0 < len(kid) <= _LONGEST_KID:
            raise Unauthenticated("the token names no key (kid)", "malformed_token")
        key = self.keys.get(kid, algorithm)
        if key is None:
            if self.keys.knows(kid):
                raise Unauthenticated("the token's algorithm does not fit its key", "algorithm")
            raise UnknownKey
        try:
            payload = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=list(self._rules.audience),
                issuer=self._rules.issuer,
                leeway=self._leeway,
                options={"require": ["exp", "iss", "aud"], "enforce_minimum_key_length": True},
            )
        except PyJWTError as error:
            raise _refused(error) from None
        except (ValueError, TypeError, OverflowError):
            raise Unauthenticated(*_MALFORMED) from None
        return payload

    def _header(self, token: str) -> Mapping[str, Any]:
        """Return the unverified header. Its hints to a key (jku, x5u, jwk, x5c) are ignored: the keys' address is
        configured."""
        try:
            header = jwt.get_unverified_header(token)
        except (PyJWTError, ValueError, RecursionError):
            raise Unauthenticated(*_MALFORMED) from None
        if "crit" in header:
            raise Unauthenticated("the token requires unknown extensions (crit)", "malformed_token")
        kind = header.get("typ", _KINDS[0])
        if not isinstance(kind, str) or kind.lower() not in _KINDS:
            raise Unauthenticated("the token is not an access token (typ)", "malformed_token")
        return header

    def _principal(self, payload: Mapping[str, Any]) -> Principal:
        rules = self._rules
        for moment in ("exp", "nbf", "iat"):
            value = payload.get(moment, 0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not -_LAST <= value <= _LAST:
                raise Unauthenticated(f"the token's {moment} is not a valid time", "incomplete_token")
        if rules.tenant is not None:
            named = next((payload[claim] for claim in rules.tenants if claim in payload), None)
            if named != rules.tenant:
                raise Unauthenticated("the token is of another tenant", "tenant")
        subject = payload.get(rules.subject_claim)
        if not isinstance(subject, str) or not 0 < len(subject) <= _LONGEST_SUBJECT or not subject.isprintable():
            raise Unauthenticated(f"the token has no valid subject ({rules.subject_claim})", "incomplete_token")
        means = {rules.scopes[name] for name in _names(payload, rules.scope_claim) if name in rules.scopes}
        scopes = frozenset(scope for scope in SCOPES if scope in means)
        return Principal(subject, scopes, rules.claims(payload), EVERY_ROW in means, credential="token")


def _refused(error: PyJWTError) -> Unauthenticated:
    for kind, why, code in _WHY:
        if isinstance(error, kind):
            return Unauthenticated(why, code)
    return Unauthenticated(*_MALFORMED)


def _names(payload: Mapping[str, Any], claim: str) -> list[str]:
    """Return the names in a claim: a list, or words in one text. `claim` is a name with dots, or a path a.b."""
    found: Any = payload.get(claim)
    if claim not in payload:
        found = payload
        for part in claim.split("."):
            found = found.get(part) if isinstance(found, dict) else None
    if isinstance(found, str):
        return found.split()
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []

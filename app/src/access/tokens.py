"""Verify tokens (JWT) of the configured issuer, including SAP's issuers, and return the principal. PyJWT checks
signature and times, this module everything else. It never waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jwt
from jwt.exceptions import (
    ExpiredSignatureError,
    ImmatureSignatureError,
    InvalidAlgorithmError,
    InvalidAudienceError,
    InvalidIssuedAtError,
    InvalidIssuerError,
    InvalidKeyError,
    InvalidSignatureError,
    MissingRequiredClaimError,
    PyJWTError,
)

from app.src.access.jwks import KeySet
from app.src.access.principal import SCOPES, Principal, Unauthenticated
from app.src.settings import JwtSettings

_ATTRIBUTES = "xs.user.attributes"
# Characters. XSUAA tokens with many attributes come near 8 KiB.
LONGEST_TOKEN = 16 << 10
_LONGEST_KID = 256
_LONGEST_SUBJECT = 200
# The header typ of access tokens; without typ a token may be one.
_KINDS = ("jwt", "at+jwt", "application/at+jwt")
_WHY: tuple[tuple[type[PyJWTError], str, str], ...] = (
    (ExpiredSignatureError, "the token has expired", "expired_token"),
    (ImmatureSignatureError, "the token is not valid yet", "early_token"),
    (InvalidIssuedAtError, "the token was issued in the future, or its iat is invalid", "early_token"),
    (InvalidAudienceError, "the token is for another audience", "audience"),
    (InvalidIssuerError, "the token is of another issuer", "issuer"),
    (MissingRequiredClaimError, "the token lacks one of the claims iss, aud and exp", "incomplete_token"),
    (InvalidAlgorithmError, "the token's algorithm does not fit its key", "algorithm"),
    (InvalidKeyError, "the token's key is too short, or does not fit its algorithm", "algorithm"),
    (InvalidSignatureError, "the token's signature is wrong", "signature"),
)
_MALFORMED = ("neither an API key nor a token", "malformed_token")


class UnknownKey(Exception):
    """The token names an unknown key; the issuer may have published a new one."""


class Tokens:
    """Reads the configured issuer's tokens. `keys`: the issuer's. Thread-safe."""

    def __init__(self, settings: JwtSettings) -> None:
        self._settings = settings
        self._issuer, self._audience = settings.issuer or "", settings.audience
        self._scope_claim = settings.scope_claim or "scope"
        self._scopes = settings.scopes or {scope: scope for scope in SCOPES}
        # The first of these claims present must be the configured tenant.
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

    def principal(self, token: str) -> Principal:
        """Return the principal of a token. Raises Unauthenticated and UnknownKey."""
        if len(token) > LONGEST_TOKEN:
            raise Unauthenticated(f"the token is longer than {LONGEST_TOKEN} characters", "malformed_token")
        kid, algorithm = self._header(token)
        key = self.keys.get(kid, algorithm)
        if key is None:
            raise UnknownKey
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

    def _header(self, token: str) -> tuple[str, str]:
        """Return kid and alg of the unverified header. Key locations in the token (jku, x5u, jwk, x5c) are ignored: the
        address is configured."""
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
        if not isinstance(kid, str) or not 0 < len(kid) <= _LONGEST_KID:
            raise Unauthenticated("the token names no key (kid)", "malformed_token")
        return kid, algorithm

    def _principal(self, payload: Mapping[str, Any]) -> Principal:
        tenant = self._settings.tenant
        if tenant is not None:
            named = next((payload[claim] for claim in self._tenants if claim in payload), None)
            if named != tenant:
                raise Unauthenticated("the token is of another tenant", "tenant")
        subject = payload.get("sub")
        if not isinstance(subject, str) or not 0 < len(subject) <= _LONGEST_SUBJECT or not subject.isprintable():
            raise Unauthenticated("the token has no valid subject (sub)", "incomplete_token")
        means = {self._scopes[name] for name in _names(payload, self._scope_claim) if name in self._scopes}
        scopes = frozenset(scope for scope in SCOPES if scope in means)
        claims = payload
        if self._settings.preset == "xsuaa":
            # Row rights name SAP's user attributes at the top level, as `xs.user.attributes.Country`. The newer layout
            # has them in ext_cxt. A top-level claim with such a name is not the issuer's attribute.
            inside = payload.get("ext_cxt")
            held = (inside if isinstance(inside, dict) else payload).get(_ATTRIBUTES)
            lifted = {f"{_ATTRIBUTES}.{name}": value for name, value in held.items()} if isinstance(held, dict) else {}
            own = {name: value for name, value in payload.items() if not name.startswith(f"{_ATTRIBUTES}.")}
            claims = own | lifted
        return Principal(subject, scopes, claims, "every_row" in means, credential="token")


def _names(payload: Mapping[str, Any], claim: str) -> list[str]:
    """Return the names in a claim: a list, or words in a text. `claim`: a name with dots, or a path a.b."""
    found: Any = payload.get(claim)
    if claim not in payload:
        found = payload
        for part in claim.split("."):
            found = found.get(part) if isinstance(found, dict) else None
    if isinstance(found, str):
        return found.split()
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []

"""How the tokens of an issuer are read: what the settings say, with what is known of SAP's issuers for the rest.

Sources: SAP's own libraries for these tokens, as published (cloud-pysec, @sap/xssec 4.12, cloud-security-client-go).
Neither preset has met a real tenant here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.src.access.principal import SCOPES
from app.src.settings import JwtSettings

EVERY_ROW = "every_row"
_OWN_NAMES = {scope: scope for scope in SCOPES}
_ATTRIBUTES = "xs.user.attributes"


@dataclass(frozen=True, slots=True)
class Reading:
    """`issuer`, `audience`: what iss must be and one of aud. `tenants`: claims of which the first that is there must be
    `tenant`. `scopes`: names in `scope_claim` and what they stand for. `attributes`: claims of SAP's attributes of a
    user are lifted out, so that row rules can name them."""

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
        """As row rules see them: `xs.user.attributes.Country` beside what stands in the token."""
        if not self.attributes:
            return payload
        # Beside the other claims, or in ext_cxt where the token has the newer layout.
        inside = payload.get("ext_cxt")
        held = (inside if isinstance(inside, dict) else payload).get(_ATTRIBUTES)
        lifted = {f"{_ATTRIBUTES}.{name}": value for name, value in held.items()} if isinstance(held, dict) else {}
        # What the token itself claims under such a name is not what its issuer means by it.
        return {name: value for name, value in payload.items() if not name.startswith(f"{_ATTRIBUTES}.")} | lifted


def reading(settings: JwtSettings) -> Reading:
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
            return Reading(
                **given | {"jwks_url": settings.jwks_url or f"{base}/oauth2/certs"},
                issuer=base,
                scope_claim=settings.scope_claim or "groups",
                tenants=tenants or ("app_tid", "zone_uuid"),
            )
        case None:
            return Reading(**given, issuer=issuer, scope_claim=settings.scope_claim or "scope", tenants=tenants)


def _xsuaa(settings: JwtSettings, base: str, given: Mapping[str, Any], tenants: tuple[str, ...]) -> Reading:
    """Scopes are called <xsappname>.<name>, and are ours only with that name before them."""
    application = settings.xs_appname or ""
    before = f"{application}."
    scopes = {before + name.removeprefix(before): meaning for name, meaning in given["scopes"].items()}
    return Reading(
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

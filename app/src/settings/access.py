"""The section [access]: API keys, tokens and limits. Validates without files and network."""

from __future__ import annotations

import ipaddress
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, field_validator, model_validator

from app.src.settings.section import Columns, Section, Split, setting

UNLIMITED = "unlimited"
_RATE = re.compile(r"[1-9]\d{0,8}/(second|minute|hour|day)")


def check_rate(rate: str) -> str:
    if rate != UNLIMITED and not _RATE.fullmatch(rate):
        raise ValueError(f'invalid rate {rate!r}: write "600/minute" (second, minute, hour, day), or "{UNLIMITED}"')
    return rate


Rate = Annotated[str, AfterValidator(check_rate)]  # a number per time: "600/minute"

# No shared secrets: a service that can check such a token could create one.
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
# What a name in a token may grant: a scope, or every row.
Meaning = Literal["embed", "search", "sync", "admin", "metrics", "every_row"]


def _pairs(value: Any) -> Any:
    """Parse a variable such as `Viewer=search, Operator=sync`."""
    if not isinstance(value, str):
        return value
    parts = [part.partition("=") for part in value.split(",") if part.strip()]
    if not all(separator for _, separator, _ in parts):
        raise ValueError('write it like "Viewer=search, Operator=sync"')
    return {name.strip(): meaning.strip() for name, _, meaning in parts}


Meanings = Annotated[dict[str, Meaning], BeforeValidator(_pairs)]


@lru_cache(256)
def is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):
        return host is not None and ipaddress.ip_address(host).is_loopback
    return False


class JwtSettings(Section):
    """Tokens (JWT) of one issuer. Their keys' address is configured here, never taken from a token."""

    preset: Literal["ias", "xsuaa"] | None = setting(None, "SAP's issuers: docs/access.md")
    issuer: str | None = setting(None, "claim iss, exactly; with a preset the address of the tenant")
    jwks_url: str | None = setting(None, "the issuer's keys: https, or http on loopback; default: the preset's")
    jwks_path: Path | None = setting(None, "the same from a file, read again when it changes; nothing is fetched then")
    audience: Columns = setting((), "claim aud must hold one of these; xsuaa: xs_appname by itself")
    algorithms: Annotated[tuple[Algorithm, ...], Split] = setting(("RS256", "ES256"), "signatures", min_length=1)
    scope_claim: str | None = setting(None, "a list or words; a.b looks inside; default: scope (ias: groups)")
    scopes: Meanings = setting({}, 'names there and their scopes: { Viewer = "search" }; default: our own names')
    tenant: str | None = setting(None, "claim zid (xsuaa) or app_tid (ias), exactly")
    tenant_claim: str | None = setting(None, "where the tenant is; default: the preset's")
    xs_appname: str | None = setting(None, 'xsuaa: name of the application, such as "owl!t1234"')
    leeway: ClassVar[float] = 30.0  # allowed clock difference in seconds

    @field_validator("jwks_url")
    @classmethod
    def _encrypted(cls, address: str | None) -> str | None:
        if address is None:
            return None
        parts = urlsplit(address)
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname)):
            raise ValueError("must begin with https:// (http:// only on loopback): forged keys allow forged tokens")
        try:
            plain = parts.hostname and parts.port != 0 and not (parts.username or parts.password or parts.fragment)
        except ValueError:
            plain = False
        if not plain:
            raise ValueError("must be a plain address: https://host:443/path, without user, password and #fragment")
        return address

    @model_validator(mode="after")
    def _complete(self) -> JwtSettings:
        if not self.issuer or self.issuer != self.issuer.strip():
            raise ValueError("issuer is missing, or has blanks around it: name the issuer whose tokens are accepted")
        if self.jwks_url is not None and self.jwks_path is not None:
            raise ValueError("jwks_url and jwks_path are both set; keep one of them")
        if self.preset is None and self.jwks_url is None and self.jwks_path is None:
            raise ValueError("jwks_url or jwks_path is missing: name the issuer's keys")
        if self.preset is not None and not self.issuer.startswith("https://"):
            raise ValueError(f"issuer must begin with https:// with preset {self.preset}")
        if self.preset == "xsuaa":
            if self.xs_appname is None:
                raise ValueError('preset = "xsuaa" needs xs_appname (`xsappname` of the binding)')
            if self.tenant is None:
                raise ValueError('preset = "xsuaa" needs tenant (`tenantid` of the binding): the claim zid')
        elif not self.audience:
            raise ValueError("audience is missing: tokens for other applications must be rejected")
        elif self.xs_appname is not None:
            raise ValueError('xs_appname belongs to preset = "xsuaa"')
        if self.preset == "ias" and not self.scopes:
            raise ValueError(
                'preset = "ias" needs scopes, such as { "Owl Viewers" = "search" }: groups belong to the whole tenant, '
                'and a group named "admin" must not give the scope admin'
            )
        if self.tenant is not None and self.preset is None and self.tenant_claim is None:
            raise ValueError("tenant needs tenant_claim: the name of its claim")
        return self


class AccessSettings(Section):
    """Authentication and limits. Without keys and jwt there is no authentication, and `serve` stays on loopback."""

    keys: Path | None = setting(None, "file of API keys, made by `owl-sap keys create`; read again when it changes")
    jwt: JwtSettings | None = None
    open_metrics: bool = setting(False, "GET /metrics without a credential")
    hosts: Columns = setting((), "without authentication: further accepted Host names, for a proxy that keeps them")
    audit: str | None = setting(None, 'file of the audit log, a JSON line for each request; "-": standard error')
    rate: Rate = setting("600/minute", 'requests of one key without its own rate (or "unlimited"); then HTTP 429')
    tokens: Rate = setting(UNLIMITED, 'tokens that one key may embed, such as "1000000/minute"; then HTTP 429')
    concurrency: int = setting(32, "concurrent requests of one key without its own limit; 0: unlimited", ge=0)
    failures: Rate = setting("30/minute", "failed authentications of one address; then HTTP 429 in place of 401")

    @property
    def configured(self) -> bool:
        """Whether requests need a credential."""
        return self.keys is not None or self.jwt is not None

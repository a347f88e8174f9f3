"""The principal of a request, and the errors of authentication. Their messages repeat nothing that was sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from connector.errors import ConfigurationError

Scope = Literal["embed", "search", "sync", "admin", "metrics"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
Credential = Literal["key", "token", "none"]
"""What somebody showed to say who they are."""


@dataclass(frozen=True, slots=True)
class Principal:
    """`name`: the key's id or the token's subject, for logs; never a secret. `scopes`: what may be asked for; `admin`
    includes the others. `claims`: what the token or the key says of its bearer; collections with row rules look here,
    and what is not claimed is not seen. `every_row`: row rules do not hold for it. `rate` ("600/minute") and
    `concurrency`: its own limits; None: those of the settings. `credential`: what it was known by; only together with
    that a name is nobody else's, for an issuer may call a user what we call a key."""

    name: str
    scopes: frozenset[Scope]
    claims: Mapping[str, Any] = field(default_factory=dict, repr=False)
    every_row: bool = False
    rate: str | None = None
    concurrency: int | None = None
    credential: Credential = "none"

    @property
    def identity(self) -> str:
        """Of one principal alone."""
        return f"{self.credential}:{self.name}"

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes


OPERATOR = Principal("operator", frozenset(SCOPES), every_row=True)
"""Who runs the command line, and so has the credentials for HANA anyway."""
LOOPBACK = Principal("loopback", frozenset(SCOPES))
"""Anybody on this machine, while no authentication is configured. It claims nothing, so row rules leave it no row."""
ANONYMOUS = Principal("anonymous", frozenset())
"""Who says nothing of itself, where that is allowed: at health, while authentication is configured."""


class Unauthenticated(Exception):
    """No credential, or none that is good. `code`: a word for machines and logs, out of few."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class IssuerAway(Exception):
    """The keys of the tokens' issuer cannot be had, so nobody can tell whether a token is good. Try later."""


class AccessUnusable(ConfigurationError):
    """The file of keys, or that of the issuer's keys, cannot be used; the message says what to do."""

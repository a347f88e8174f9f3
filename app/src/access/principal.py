"""The principal of a request, and the errors of authentication. Error messages never quote the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from connector.errors import ConfigurationError

Scope = Literal["embed", "search", "sync", "admin", "metrics"]
SCOPES: tuple[Scope, ...] = get_args(Scope)


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of a request. `name`: the key's id or the token's subject, for logs; never a secret. `scopes`: `admin`
    includes the others. `claims`: from the token or key, for row rights. `every_row`: row rights do not apply. `rate`
    ("600/minute") and `concurrency`: own limits; None: the limits from the settings. `credential`: its kind. Names are
    unique only per kind, because a token's subject may equal a key's id."""

    name: str
    scopes: frozenset[Scope]
    claims: Mapping[str, Any] = field(default_factory=dict, repr=False)
    every_row: bool = False
    rate: str | None = None
    concurrency: int | None = None
    credential: Literal["key", "token", "none"] = "none"

    @property
    def identity(self) -> str:
        """Return a name that no other principal has."""
        return f"{self.credential}:{self.name}"

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes


# The user of the command line, who has HANA's credentials anyway.
OPERATOR = Principal("operator", frozenset(SCOPES), every_row=True)
# Any caller while no authentication is configured. Without claims, row rights hide all rows.
LOOPBACK = Principal("loopback", frozenset(SCOPES))
# A caller without a credential, on routes that allow it while authentication is configured.
ANONYMOUS = Principal("anonymous", frozenset())


ISSUER_AWAY = "issuer_away"


class Unauthenticated(Exception):
    """The credential is missing or invalid, or cannot be checked now (ISSUER_AWAY). `code`: a word for logs."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class AccessUnusable(ConfigurationError):
    """The file of API keys or of the issuer's keys is unusable; the message says what to do."""

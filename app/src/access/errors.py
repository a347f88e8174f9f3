"""Why somebody is not let in. The messages may be shown to who asks: they repeat nothing of what was sent."""

from __future__ import annotations

from connector.errors import ConfigurationError


class Unauthenticated(Exception):
    """No credential, or none that is good. `code`: a word for machines and logs, out of few."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class IssuerAway(Exception):
    """The keys of the tokens' issuer cannot be had, so nobody can tell whether a token is good. Try later."""


class AccessUnusable(ConfigurationError):
    """The file of keys, or that of the issuer's keys, cannot be used; the message says what to do."""

"""Create API keys, store their digests, and check keys. The file is read again when it changes; if it is damaged, the
last valid keys stay in use.

A plain digest suffices: 256 random bits cannot be guessed, so salt and stretching would only slow down each request.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from app.src.access.files import Reloaded, write_private
from app.src.access.principal import ANONYMOUS, AccessUnusable, Principal, Scope, Unauthenticated
from app.src.settings.model import Rate, check_rate

PREFIX = "owl_"
_MOST_BYTES = 4 << 20
_SOON = timedelta(days=14)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,99}")
# A rotation copies these to the new key.
_RIGHTS = ("name", "scopes", "claims", "every_row", "rate", "concurrency")
Deliver = Callable[[str], object]  # gets a new key before it is stored; if it raises, nothing changes


class Key(BaseModel):
    """The record of one key, without the key itself. `concurrency`: concurrent requests, 0: unlimited."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    id: str = Field(pattern=r"^[0-9a-f]{4,32}$")
    name: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    scopes: tuple[Scope, ...]
    claims: dict[str, Any] = Field(default={}, repr=False)
    every_row: bool = False
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None
    rate: Rate | None = None
    concurrency: int | None = Field(default=None, ge=0)

    def state(self, now: datetime) -> str:
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "active"

    def shown(self, now: datetime) -> dict[str, Any]:
        """Return the record without its digest, for listings."""
        return {"id": self.id, "name": self.name, "state": self.state(now)} | self.model_dump(exclude={"sha256"})

    @property
    def principal(self) -> Principal:
        scopes = frozenset(self.scopes)
        return Principal(self.id, scopes, self.claims, self.every_row, self.rate, self.concurrency, "key")


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    version: int = Field(default=1, ge=1, le=1)
    keys: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights of a new key. `lifetime`: seconds, None: unlimited."""

    name: str
    scopes: Sequence[Scope]
    claims: Mapping[str, Any] = field(default_factory=dict)
    every_row: bool = False
    lifetime: float | None = None
    rate: str | None = None
    concurrency: int | None = None


def read(path: Path) -> tuple[Key, ...]:
    """Return the keys of a file. Raises AccessUnusable, whose message says what to do."""
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise AccessUnusable(
            f"{path}: the file of API keys does not exist (setting access.keys); create one: "
            "owl-sap keys create NAME --scope search"
        ) from None
    except OSError as error:
        raise AccessUnusable(f"{path}: the file of API keys cannot be read ({error.strerror})") from None
    if about.st_mode & stat.S_IWOTH:
        raise AccessUnusable(f"{path}: all users may write this file of API keys; run: chmod 600 {path}")
    if len(content) > _MOST_BYTES:
        raise AccessUnusable(f"{path}: a file of API keys has at most {_MOST_BYTES >> 20} MiB")
    try:
        keys = _File.model_validate_json(content).keys
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, fault["loc"]))
        what = f"{where}: {fault['msg']}" if where else "not JSON"
        raise AccessUnusable(
            f"{path}: not a valid file of API keys ({what}); restore it, or move it away and create new keys"
        ) from None
    if len({key.id for key in keys}) < len(keys):
        raise AccessUnusable(f"{path}: two keys have the same id; remove one of them")
    return keys


@contextmanager
def _changing(path: Path) -> Iterator[list[Key]]:
    """Yield a list of the keys to change in place, and write it at the end. Locked against other processes."""
    path = path.resolve()  # replace a link's target, not the link
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        what = f"{path.parent}: the folder for the API keys is unusable ({error.strerror})"
        raise AccessUnusable(f"{what}; create it: mkdir -m 700 {path.parent}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        keys = list(read(path)) if path.exists() else []
        yield keys
        write_private(path, _File(keys=tuple(keys)).model_dump_json(indent=2).encode() + b"\n")
        os.fsync(folder)
    finally:
        os.close(folder)


def create(path: Path, grant: Grant, now: datetime | None = None, deliver: Deliver | None = None) -> tuple[Key, str]:
    """Create a key; return its record and the key itself, which is not stored. Raises ValueError, AccessUnusable."""
    now = now or datetime.now(UTC)
    if not _NAME.fullmatch(grant.name):
        raise ValueError(f"{grant.name!r} is not a valid key name: letters, digits, blanks and ._@-, at most 100")
    if not grant.scopes:
        raise ValueError("a key needs a scope; give --scope")
    if grant.rate is not None:
        check_rate(grant.rate)
    with _changing(path) as keys:
        if any(key.name == grant.name and key.state(now) == "active" for key in keys):
            raise ValueError(f'an active key named "{grant.name}" exists; rotate or revoke it, or choose another name')
        return _add(keys, now, grant.lifetime, {name: getattr(grant, name) for name in _RIGHTS}, deliver)


def _add(
    keys: list[Key], now: datetime, lifetime: float | None, rights: Mapping[str, Any], deliver: Deliver | None
) -> tuple[Key, str]:
    identifier = secrets.token_hex(6)
    secret = f"{PREFIX}{identifier}_{secrets.token_urlsafe(32)}"
    expires = None if lifetime is None else now + timedelta(seconds=lifetime)
    keys.append(Key(id=identifier, sha256=_digest(secret), created=now, expires=expires, **rights))
    if deliver is not None:
        deliver(secret)
    return keys[-1], secret


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def revoke(path: Path, which: str, now: datetime | None = None) -> list[Key]:
    """Revoke the active keys with this id or name and return them. Raises ValueError if no active key matches."""
    now = now or datetime.now(UTC)
    with _changing(path) as keys:
        places = _active(keys, which, now)
        for place in places:
            keys[place] = keys[place].model_copy(update={"revoked": now})
        return [keys[place] for place in places]


def rotate(
    path: Path,
    which: str,
    overlap: float,
    lifetime: float | None = None,
    now: datetime | None = None,
    deliver: Deliver | None = None,
) -> tuple[Key, str]:
    """Replace a key by a new one with the same rights; the old one stays valid for `overlap` seconds. `lifetime` of the
    new key defaults to the old one's. Raises ValueError unless exactly one active key has this id or name."""
    now = now or datetime.now(UTC)
    with _changing(path) as keys:
        places = _active(keys, which, now)
        if len(places) > 1:
            ids = ", ".join(keys[place].id for place in places)
            raise ValueError(
                f'several active keys are named "{which}" (an earlier rotation overlaps): {ids}; give an id'
            )
        old = keys[places[0]]
        if lifetime is None and old.expires is not None:
            lifetime = (old.expires - old.created).total_seconds()
        until = now + timedelta(seconds=overlap)
        keys[places[0]] = old.model_copy(update={"expires": until if old.expires is None else min(old.expires, until)})
        return _add(keys, now, lifetime, {name: getattr(old, name) for name in _RIGHTS}, deliver)


def _active(keys: Sequence[Key], which: str, now: datetime) -> list[int]:
    named = [place for place, key in enumerate(keys) if which in (key.id, key.name)]
    active = [place for place in named if keys[place].state(now) == "active"]
    if not active:
        missing = "does not exist; owl-sap keys list shows the keys"
        raise ValueError(f'the key "{which}" {f"is already {keys[named[-1]].state(now)}" if named else missing}')
    return active


class KeyRing(Reloaded[Mapping[str, tuple[Key, Principal]]]):
    """The keys in memory, read again when the file changes."""

    def __init__(self, path: Path) -> None:
        """Store the path; `open` reads the file and raises AccessUnusable."""
        super().__init__(path)
        self.content = {}

    def load(self) -> Mapping[str, tuple[Key, Principal]]:
        return {key.id: (key, key.principal) for path in self._paths for key in read(path)}

    def described(self) -> str:
        now = datetime.now(UTC)
        active = [key for key, _ in self.content.values() if key.state(now) == "active"]
        soon = sorted(key.name for key in active if key.expires is not None and key.expires - now < _SOON)
        ending = f", of which expire within {_SOON.days} days: {', '.join(soon)}" if soon else ""
        return f"{len(active)} active API keys{ending}"

    def principal(self, given: str, now: datetime | None = None) -> Principal:
        """Return the principal of this key. Raises Unauthenticated."""
        self.refresh()
        given = given[:129]  # limits the digest's work; a longer key is invalid anyway
        identifier, _, _ = given.removeprefix(PREFIX).partition("_")
        key, principal = self.content.get(identifier, (None, ANONYMOUS))
        stored = "0" * 64 if key is None else key.sha256
        if not hmac.compare_digest(_digest(given), stored) or key is None:
            raise Unauthenticated("unknown API key", "unknown_key")
        state = key.state(now or datetime.now(UTC))
        if state != "active":
            raise Unauthenticated(f"this API key is {state}", f"{state}_key")
        return principal

"""The rights that the settings ask for: as statements for whoever administers HANA, and as what doctor compares with.
Knows settings and the connector's list of privileges; connects to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from app.src.settings import HanaSettings, Settings
from connector.errors import ConfigurationError
from connector.hana import privileges
from connector.hana.change_log import log_of
from connector.hana.connection import quote
from connector.hana.privileges import Privilege, named
from connector.model import CollectionSpec, TableRef


@dataclass(frozen=True, slots=True)
class Grantee:
    """Who is to get the rights: `user` (default: that of the settings), through `role` if one is named."""

    user: str | None = None
    role: str | None = None
    search_only: bool = False
    setup: bool = False
    """The rights to put change logs in (`changes install --apply`), and nothing else."""


@dataclass(frozen=True, slots=True)
class Statement:
    """`system`: "hana" or "store.hana", the section of the settings that says which HANA."""

    system: str
    sql: str
    why: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def statements(settings: Settings, grantee: Grantee) -> list[Statement]:
    """In the order in which they must run. A role gets the privileges on what is there; a schema for the vectors
    belongs to the user himself. Raises ConfigurationError where nothing is to be granted, or to nobody known.
    """
    found: list[Statement] = []
    for system, hana in _systems(settings):
        user = _user(system, hana, grantee)
        wanted = [each for each in _wanted(settings, system, grantee) if not _is_his_by_birth(each, user)]
        if not wanted:
            continue
        receiver = user
        if grantee.role is not None and any(isinstance(each, Privilege) for each in wanted):
            receiver = named(grantee.role)
            found.append(Statement(system, f"CREATE ROLE {receiver}", "once; leave it out where the role is there"))
        found += [_statement(system, each, receiver, user) for each in wanted]
        if receiver != user:
            found.append(Statement(system, f"GRANT {receiver} TO {user}", "the role to the user"))
    if not found:
        raise ConfigurationError(_nothing(settings, grantee))
    return found


def needed(settings: Settings, system: str) -> list[Privilege]:
    """All that the user of a system needs while he runs."""
    return [each for each in _wanted(settings, system, Grantee()) if isinstance(each, Privilege)]


def own_places(settings: Settings, system: str) -> set[TableRef | str]:
    """What may belong to him: the schema of the vectors, and logs that he has put in himself."""
    places: set[TableRef | str] = set()
    if _keeps_vectors(settings, system) and settings.store_schema:
        places.add(settings.store_schema)
    if system == "hana":
        places |= {log_of(spec) for spec in _specs(settings) if spec.changes.method == "log"}
    return places


def _systems(settings: Settings) -> Iterator[tuple[str, HanaSettings]]:
    yield "hana", settings.hana
    if settings.store.kind == "hana" and settings.store.hana is not None:
        yield "store.hana", settings.store.hana


def _user(system: str, hana: HanaSettings, grantee: Grantee) -> str:
    user = grantee.user or hana.user
    if not user:
        where = f"the key {hana.userkey} in SAP's user store names him" if hana.userkey else f"[{system}] has no user"
        raise ConfigurationError(f"who is to be granted the rights? {where}: --user NAME")
    return named(user)


@dataclass(frozen=True, slots=True)
class _OwnSchema:
    name: str


def _wanted(settings: Settings, system: str, grantee: Grantee) -> Iterator[Privilege | _OwnSchema]:
    specs = _specs(settings) if system == "hana" else ()
    schema = settings.store_schema if _keeps_vectors(settings, system) else None
    if grantee.setup:
        yield from dict.fromkeys(each for spec in specs for each in privileges.installing(spec))
    elif grantee.search_only:
        if schema:
            yield privileges.searching(schema)
    else:
        yield from dict.fromkeys(each for spec in specs for each in privileges.reading(spec))
        if schema and schema in {spec.source.schema for spec in specs}:
            yield privileges.creating(schema)
        elif schema:
            yield _OwnSchema(schema)


def _is_his_by_birth(wanted: Privilege | _OwnSchema, user: str) -> bool:
    """CREATE USER makes a schema of the user's name."""
    return isinstance(wanted, _OwnSchema) and quote(wanted.name) == user


def _statement(system: str, wanted: Privilege | _OwnSchema, receiver: str, user: str) -> Statement:
    if isinstance(wanted, Privilege):
        return Statement(system, wanted.grant(receiver), wanted.why)
    return Statement(
        system,
        f"CREATE SCHEMA {quote(wanted.name)} OWNED BY {user}",
        f"vectors and their state; where it is there and not his: {privileges.creating(wanted.name).grant(user)}",
    )


def _specs(settings: Settings) -> tuple[CollectionSpec, ...]:
    return tuple(collection.spec() for collection in settings.synced)


def _keeps_vectors(settings: Settings, system: str) -> bool:
    if settings.store.kind != "hana":
        return False
    return system == ("hana" if settings.store.hana is None else "store.hana")


def _nothing(settings: Settings, grantee: Grantee) -> str:
    if grantee.setup:
        return 'no collection has changes = { method = "log" }: nothing is to be put in, so no rights are needed for it'
    if grantee.search_only and settings.store.kind != "hana":
        return f"the vectors are in {settings.store.path}: who only searches needs no rights in HANA"
    return "no rights are needed in HANA: there are no [[collections]], and no vectors are kept there"

"""The HANA rights that the settings require: as SQL for an administrator, and for doctor to compare with. Does not
connect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from app.src.settings import Settings
from connector.errors import ConfigurationError
from connector.hana import privileges
from connector.hana.connection import quote
from connector.hana.privileges import Privilege, named
from connector.model import TableRef, log_of


@dataclass(frozen=True, slots=True)
class Statement:
    """`system`: "hana" or "store.hana", the settings section of the HANA."""

    system: str
    sql: str
    why: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def statements(
    settings: Settings,
    *,
    user: str | None = None,
    role: str | None = None,
    search_only: bool = False,
    setup: bool = False,
) -> list[Statement]:
    """Return the statements in execution order. `user`: default that of the settings; `role`: grant through this role.
    The user itself owns the schema for the vectors. `setup`: only the rights to install change logs. Raises
    ConfigurationError if nothing is to be granted, or the user is unknown."""
    found: list[Statement] = []
    systems = {"hana": settings.hana}
    if settings.store.kind == "hana" and settings.store.hana is not None:
        systems["store.hana"] = settings.store.hana
    for system, hana in systems.items():
        name = user or hana.user
        if not name:
            known = (
                f"the key {hana.userkey} in SAP's user store names it" if hana.userkey else f"[{system}] has no user"
            )
            raise ConfigurationError(f"unknown user to grant the rights to ({known}): --user NAME")
        grantee = named(name)
        wanted = [
            each
            for each in _wanted(settings, system, search_only=search_only, setup=setup)
            if isinstance(each, Privilege) or quote(each) != grantee  # CREATE USER makes a schema of the user's name
        ]
        if not wanted:
            continue
        receiver = grantee
        if role is not None and any(isinstance(each, Privilege) for each in wanted):
            receiver = named(role)
            found.append(Statement(system, f"CREATE ROLE {receiver}", "once; leave it out where the role is there"))
        for each in wanted:
            if isinstance(each, Privilege):
                found.append(Statement(system, each.grant(receiver), each.why))
            else:
                existing = privileges.creating(each).grant(grantee)
                why = f"vectors and their state; where the schema exists and has another owner: {existing}"
                found.append(Statement(system, f"CREATE SCHEMA {quote(each)} OWNED BY {grantee}", why))
        if receiver != grantee:
            found.append(Statement(system, f"GRANT {receiver} TO {grantee}", "the role to the user"))
    if found:
        return found
    if setup:
        raise ConfigurationError(
            'no collection has changes = { method = "log" }: nothing is to be installed, so no rights are needed for it'
        )
    if search_only and settings.store.kind != "hana":
        raise ConfigurationError(
            f"the vectors are in {settings.store.path}: a user that only searches needs no rights in HANA"
        )
    raise ConfigurationError(
        "no rights are needed in HANA: there are no [[collections]], and no vectors are kept there"
    )


def needed(settings: Settings, system: str) -> list[Privilege]:
    """Return the privileges that the user of a system needs at run time."""
    return [each for each in _wanted(settings, system) if isinstance(each, Privilege)]


def own_places(settings: Settings, system: str) -> set[TableRef | str]:
    """Return what the user may own: the schema of the vectors, and change logs."""
    places: set[TableRef | str] = set()
    if _keeps_vectors(settings, system) and settings.store_schema:
        places.add(settings.store_schema)
    if system == "hana":
        specs = (collection.spec() for collection in settings.synced)
        places |= {log_of(spec) for spec in specs if spec.changes.method == "log"}
    return places


def _wanted(
    settings: Settings, system: str, *, search_only: bool = False, setup: bool = False
) -> Iterator[Privilege | str]:
    """Yield privileges, and the names of schemas that the user must own."""
    specs = [collection.spec() for collection in settings.synced] if system == "hana" else []
    schema = settings.store_schema if _keeps_vectors(settings, system) else None
    if setup:
        yield from dict.fromkeys(each for spec in specs for each in privileges.installing(spec))
    elif search_only:
        if schema:
            yield privileges.searching(schema)
    else:
        yield from dict.fromkeys(each for spec in specs for each in privileges.reading(spec))
        if schema and schema in {spec.source.schema for spec in specs}:
            yield privileges.creating(schema)
        elif schema:
            yield schema


def _keeps_vectors(settings: Settings, system: str) -> bool:
    if settings.store.kind != "hana":
        return False
    return system == ("hana" if settings.store.hana is None else "store.hana")

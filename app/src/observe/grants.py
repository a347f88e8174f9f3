"""The HANA rights that the settings require: as SQL for an administrator, and as privileges for doctor to check. Does
not connect to HANA."""

from __future__ import annotations

from collections.abc import Iterator

from app.src.settings import Settings
from connector.errors import ConfigurationError
from connector.hana import privileges
from connector.hana.connection import quote
from connector.hana.privileges import Privilege, named
from connector.model import TableRef, log_of


def statements(
    settings: Settings, *, user: str | None = None, search_only: bool = False, setup: bool = False
) -> list[dict[str, str]]:
    """Return the statements in execution order, as {"system": the settings section of the HANA, "sql", "why"}. `user`
    gets the rights and owns the schema for the vectors; default: the user in the settings. `setup`: only the rights to
    install change logs. Raises ConfigurationError if no rights are needed, or the user is unknown."""
    found: list[dict[str, str]] = []
    systems = {"hana": settings.hana}
    if settings.store.kind == "hana" and settings.store.hana is not None:
        systems["store.hana"] = settings.store.hana
    for system, hana in systems.items():
        name = user or hana.user
        if not name:
            known = f"the key {hana.userkey} in SAP's user store has it" if hana.userkey else f"[{system}] has no user"
            raise ConfigurationError(f"unknown user to grant the rights to ({known}): --user NAME")
        grantee = named(name)
        for each in wanted(settings, system, search_only=search_only, setup=setup):
            if isinstance(each, Privilege):
                found.append({"system": system, "sql": each.grant(grantee), "why": each.why})
            elif quote(each) != grantee:  # CREATE USER has created the schema with the user's name
                existing = privileges.creating(each).grant(grantee)
                why = f"vectors and their state; where the schema exists and has another owner: {existing}"
                found.append({"system": system, "sql": f"CREATE SCHEMA {quote(each)} OWNED BY {grantee}", "why": why})
    if found:
        return found
    if setup:
        raise ConfigurationError('no collection has changes = { method = "log" }: no rights are needed to install')
    why = "nothing is searched" if search_only else "there are no [[collections]], and no vectors are kept"
    raise ConfigurationError(f"no rights are needed in HANA: {why} there")


def own_places(settings: Settings, system: str) -> set[TableRef | str]:
    """Return the objects that the user may own: the schema for the vectors, and change logs."""
    places: set[TableRef | str] = {schema} if (schema := _vectors_schema(settings, system)) else set()
    if system == "hana":
        specs = (collection.spec() for collection in settings.synced)
        places |= {log_of(spec) for spec in specs if spec.changes.method == "log"}
    return places


def wanted(
    settings: Settings, system: str, *, search_only: bool = False, setup: bool = False
) -> Iterator[Privilege | str]:
    """Yield the privileges that the user of a system needs, and the names of schemas that the user must own."""
    specs = [collection.spec() for collection in settings.synced] if system == "hana" else []
    schema = _vectors_schema(settings, system)
    if setup:
        yield from dict.fromkeys(each for spec in specs for each in privileges.installing(spec))
    elif search_only:
        if schema:
            yield privileges.searching(schema)
    else:
        yield from dict.fromkeys(each for spec in specs for each in privileges.reading(spec))
        if schema:
            yield privileges.creating(schema) if schema in {spec.source.schema for spec in specs} else schema


def _vectors_schema(settings: Settings, system: str) -> str | None:
    keeper = "hana" if settings.store.hana is None else "store.hana"
    return settings.store_schema if settings.store.kind == "hana" and system == keeper else None

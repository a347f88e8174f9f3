"""Owners, roles and grants as one immutable snapshot, and the privilege checks on it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hana_emulator.errors import HanaError
from hana_emulator.sql.language.names import hana_identifier

PUBLIC = "PUBLIC"  # The role that every user has
OBJECT_PRIVILEGES = (
    *("SELECT", "INSERT", "UPDATE", "DELETE", "ALTER", "DROP", "INDEX", "TRIGGER", "REFERENCES", "EXECUTE"),
)
SCHEMA_PRIVILEGES = (*OBJECT_PRIVILEGES, "CREATE ANY")
SYSTEM_PRIVILEGES = ("CATALOG READ", "CREATE SCHEMA", "DATA ADMIN", "ROLE ADMIN", "SESSION ADMIN", "USER ADMIN")
CHANGING = ("INSERT", "UPDATE", "DELETE")
OBJECT, SCHEMA, SYSTEM, ROLE = "OBJECT", "SCHEMA", "SYSTEM", "ROLE"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS owl_administrator(name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS owl_deactivated(name TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS owl_roles(name TEXT PRIMARY KEY, creator TEXT NOT NULL, created TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS owl_owners(
  relation INTEGER PRIMARY KEY REFERENCES owl_relations(id) ON DELETE CASCADE, owner TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS owl_sequence_owners(
  sequence INTEGER PRIMARY KEY REFERENCES owl_sequences(id) ON DELETE CASCADE, owner TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS owl_grants(
  grantee TEXT NOT NULL, kind TEXT NOT NULL, privilege TEXT NOT NULL,
  schema TEXT REFERENCES owl_schemas(name) ON DELETE CASCADE,
  relation INTEGER REFERENCES owl_relations(id) ON DELETE CASCADE,
  grantor TEXT NOT NULL, grantable INTEGER NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Touch:
    """A privilege that a statement needs, on a table or view (`relation`), a schema, or the system. The `owner` of any
    other object has all privileges on it."""

    privilege: str
    schema: str = ""
    name: str = ""
    relation: int | None = None
    owner: str = ""

    @property
    def where(self) -> str:
        names = [hana_identifier(name) for name in (self.schema, self.name) if name]
        return f" on {'schema ' if len(names) == 1 else ''}{'.'.join(names)}" if names else ""


@dataclass(frozen=True, slots=True)
class Grant:
    """A granted privilege; if `kind` is ROLE, `privilege` is the name of the granted role."""

    kind: str
    privilege: str
    schema: str | None = None
    relation: int | None = None
    grantable: bool = False


@dataclass(frozen=True, slots=True)
class Rights:
    """A snapshot of all owners, roles and grants. The `administrator` has all privileges; the owner of a schema or
    object has all privileges on it."""

    administrator: str = ""
    schema_owners: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    owners: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    places: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))  # The schema of each table and view
    roles: frozenset[str] = frozenset()
    grants: Mapping[str, tuple[Grant, ...]] = field(default_factory=lambda: MappingProxyType({}))
    deactivated: frozenset[str] = frozenset()
    sequence_owners: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    synonym_owners: Mapping[tuple[str, str], str] = field(default_factory=lambda: MappingProxyType({}))

    def require(self, user: str, touches: Iterable[Touch], *, granting: bool = False) -> None:
        """Raise HanaError 258 for the first privilege that `user` lacks (with `granting`: cannot grant)."""
        for wanted in touches:
            if not self.allows(user, wanted, granting=granting):
                option = " with grant option" if granting else ""
                raise HanaError(
                    258,
                    f"insufficient privilege: {hana_identifier(user)} has no {wanted.privilege}{wanted.where}{option}",
                )

    def allows(self, user: str, wanted: Touch, *, granting: bool = False) -> bool:
        if user == self.administrator or wanted.schema == "SYS":  # each user has its own rows in EXPLAIN_PLAN_TABLE
            return True
        if self._owns(user, wanted):
            return True
        return any(
            grant.kind != ROLE
            and grant.privilege == wanted.privilege
            and grant.schema in (None, wanted.schema)
            and grant.relation in (None, wanted.relation)
            and (grant.grantable or not granting)
            for grant in self._of(user)
        )

    def sees(self, user: str, relation: int) -> bool:
        """Return whether `user` has any privilege on the relation or its schema, or CATALOG READ."""
        schema = self.places.get(relation, "")
        if schema == "SYS" or user == self.administrator or self._owns(user, Touch("", schema, relation=relation)):
            return True
        return any(
            grant.relation == relation
            or (grant.kind == SCHEMA and grant.schema == schema)
            or (grant.kind == SYSTEM and grant.privilege == "CATALOG READ")
            for grant in self._of(user)
        )

    def _owns(self, user: str, wanted: Touch) -> bool:
        if user == wanted.owner or (wanted.schema and self.schema_owners.get(wanted.schema) == user):
            return True
        return wanted.relation is not None and self.owners.get(wanted.relation) == user

    def _of(self, user: str) -> Iterable[Grant]:
        """Yield the user's grants: direct ones, and those through PUBLIC or nested roles."""
        pending, seen = [user, PUBLIC], {user, PUBLIC}
        while pending:
            for grant in self.grants.get(pending.pop(), ()):
                yield grant
                if grant.kind == ROLE and grant.privilege not in seen:
                    seen.add(grant.privilege)
                    pending.append(grant.privilege)

    def holds_role(self, user: str, role: str) -> bool:
        """Return whether `user` may grant the role."""
        mine = (grant for grant in self._of(user) if grant.kind == ROLE and grant.privilege == role)
        return user == self.administrator or any(grant.grantable for grant in mine)


def create_storage(connection: sqlite3.Connection) -> None:
    connection.executescript(_SCHEMA)


def appoint(connection: sqlite3.Connection, user: str) -> None:
    """Make `user` the administrator, able to log in; the previous one loses these rights."""
    connection.execute("DELETE FROM owl_deactivated WHERE name = ?", (user,))
    connection.execute("DELETE FROM owl_administrator")
    connection.execute("INSERT INTO owl_administrator VALUES (?)", (user,))
    connection.execute("DELETE FROM owl_grants WHERE kind = 'SYSTEM' AND grantor = 'SYS'")
    connection.executemany(
        "INSERT INTO owl_grants VALUES (?, 'SYSTEM', ?, NULL, NULL, 'SYS', 1)",
        [(user, privilege) for privilege in SYSTEM_PRIVILEGES],
    )


def record_owner(connection: sqlite3.Connection, user: str) -> None:
    """Record `user` as the owner of every object that has no owner yet."""
    connection.execute(
        "INSERT INTO owl_owners SELECT id, ? FROM owl_relations WHERE id NOT IN (SELECT relation FROM owl_owners)",
        (user,),
    )
    connection.execute(
        "INSERT INTO owl_sequence_owners"
        " SELECT id, ? FROM owl_sequences WHERE id NOT IN (SELECT sequence FROM owl_sequence_owners)",
        (user,),
    )


def load(connection: sqlite3.Connection) -> Rights:
    def rows(sql: str) -> list[tuple[Any, ...]]:
        return connection.execute(sql).fetchall()

    grants: dict[str, tuple[Grant, ...]] = {}
    for grantee, kind, privilege, schema, relation, grantable in rows(
        "SELECT grantee, kind, privilege, schema, relation, grantable FROM owl_grants"
    ):
        grants[grantee] = (*grants.get(grantee, ()), Grant(kind, privilege, schema, relation, bool(grantable)))
    return Rights(
        administrator="".join(name for (name,) in rows("SELECT name FROM owl_administrator")),
        schema_owners=MappingProxyType(dict(rows("SELECT name, owner FROM owl_schemas"))),
        owners=MappingProxyType(dict(rows("SELECT relation, owner FROM owl_owners"))),
        places=MappingProxyType(dict(rows("SELECT id, schema FROM owl_relations"))),
        roles=frozenset(name for (name,) in rows("SELECT name FROM owl_roles")),
        grants=MappingProxyType(grants),
        deactivated=frozenset(name for (name,) in rows("SELECT name FROM owl_deactivated")),
        sequence_owners=MappingProxyType(dict(rows("SELECT sequence, owner FROM owl_sequence_owners"))),
        synonym_owners=MappingProxyType(
            {(schema, name): owner for schema, name, owner in rows("SELECT schema, name, owner FROM owl_synonyms")}
        ),
    )

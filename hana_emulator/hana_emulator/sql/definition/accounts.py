"""Parse statements about users, roles and privileges; they run on a `Workbench`. `rights` checks privileges."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

from hana_emulator.errors import HanaError, not_supported
from hana_emulator.sql.catalog import rights
from hana_emulator.sql.catalog.catalog import Catalog
from hana_emulator.sql.catalog.rights import (
    OBJECT,
    OBJECT_PRIVILEGES,
    PUBLIC,
    ROLE,
    SCHEMA,
    SCHEMA_PRIVILEGES,
    SYSTEM,
    Grant,
    Touch,
)
from hana_emulator.sql.definition.objects import add_schema, drop_schemas, holds_objects
from hana_emulator.sql.definition.workbench import Definition, Workbench
from hana_emulator.sql.language.names import encode, hana_identifier
from hana_emulator.sql.language.reader import Name, Parsers, TokenReader

_NOW = "strftime('%Y-%m-%d %H:%M:%f0000', 'now')"
_ALL = "ALL PRIVILEGES"


# --- users ------------------------------------------------------------------------------------------------------------

PARSERS: Parsers[Definition] = Parsers()


@PARSERS("CREATE", "USER")
def _create_user(reader: TokenReader) -> Definition:
    name = reader.identifier()
    reader.expect("PASSWORD")
    password = reader.password()
    # FORCE_FIRST_PASSWORD_CHANGE is ignored: the emulator never forces a password change.
    _ = reader.take("NO", "FORCE_FIRST_PASSWORD_CHANGE") or reader.take("FORCE_FIRST_PASSWORD_CHANGE")

    def run(bench: Workbench) -> None:
        bench.catalog.rights.require(bench.user, [Touch("USER ADMIN")])
        _refuse_taken(bench.catalog, name, 331, "user name already exists")
        add_user(bench.connection, name, password)
        if name not in bench.catalog.schemas:
            add_schema(bench.connection, name, name)

    return run


def add_user(connection: sqlite3.Connection, name: str, password: str) -> None:
    connection.execute(f"INSERT INTO owl_users(name, password, created) VALUES (?,?, {_NOW})", (name, password))


def _refuse_taken(catalog: Catalog, name: str, code: int, text: str) -> None:
    encode(name)
    if name in catalog.users or name in catalog.rights.roles or name == PUBLIC:
        raise HanaError(code, f"{text}: {hana_identifier(name)}")


def _known_user(catalog: Catalog, name: str) -> str:
    if name not in catalog.users:
        raise HanaError(332, f"invalid user name: {hana_identifier(name)}")
    return name


@PARSERS("ALTER", "USER")
def _alter_user(reader: TokenReader) -> Definition:
    name, password, deactivate = reader.identifier(), None, False
    if reader.take("PASSWORD"):
        password = reader.password()
        _ = reader.take("NO", "FORCE_FIRST_PASSWORD_CHANGE") or reader.take("FORCE_FIRST_PASSWORD_CHANGE")
    else:
        deactivate = reader.take("DEACTIVATE")
        if not deactivate:
            reader.expect("ACTIVATE")
        reader.take("USER", "NOW")

    def run(bench: Workbench) -> None:
        if password is None or name != bench.user:
            _require_admin(bench, name)
        if password is not None:
            bench.connection.execute("UPDATE owl_users SET password = ? WHERE name = ?", (password, name))
            return
        bench.connection.execute("DELETE FROM owl_deactivated WHERE name = ?", (name,))
        if deactivate:
            bench.connection.execute("INSERT INTO owl_deactivated VALUES (?)", (name,))

    return run


def _require_admin(bench: Workbench, name: str) -> None:
    bench.catalog.rights.require(bench.user, [Touch("USER ADMIN")])
    _known_user(bench.catalog, name)


@PARSERS("DROP", "USER")
def _drop_user(reader: TokenReader) -> Definition:
    name = reader.identifier()
    cascade = reader.take("CASCADE")
    reader.take("RESTRICT")

    def run(bench: Workbench) -> None:
        _require_admin(bench, name)
        if name in (bench.user, bench.catalog.rights.administrator):
            raise HanaError(332, f"invalid user name: {hana_identifier(name)} is logged in or the administrator")
        # DROP USER also drops the user's schemas and, with CASCADE, all objects in them.
        owned = {schema for schema, owner in bench.catalog.rights.schema_owners.items() if owner == name}
        if not cascade and any(holds_objects(bench.catalog, schema) for schema in owned):
            raise HanaError(417, f"can't drop without CASCADE specification: {hana_identifier(name)} owns objects")
        drop_schemas(bench, owned)
        for statement in ("DELETE FROM owl_users WHERE name = ?", "DELETE FROM owl_deactivated WHERE name = ?"):
            bench.connection.execute(statement, (name,))
        bench.connection.execute("DELETE FROM owl_grants WHERE grantee = ?", (name,))

    return run


# --- roles ------------------------------------------------------------------------------------------------------------


@PARSERS("CREATE", "ROLE")
def _create_role(reader: TokenReader) -> Definition:
    name = reader.identifier()

    def run(bench: Workbench) -> None:
        bench.catalog.rights.require(bench.user, [Touch("ROLE ADMIN")])
        _refuse_taken(bench.catalog, name, 387, "role name already exists")
        bench.connection.execute(
            f"INSERT INTO owl_roles(name, creator, created) VALUES (?,?, {_NOW})", (name, bench.user)
        )
        _add_grant(bench, bench.user, Grant(ROLE, name, grantable=True))

    return run


@PARSERS("DROP", "ROLE")
def _drop_role(reader: TokenReader) -> Definition:
    name = reader.identifier()

    def run(bench: Workbench) -> None:
        bench.catalog.rights.require(bench.user, [Touch("ROLE ADMIN")])
        _known_role(bench.catalog, name)
        bench.connection.execute("DELETE FROM owl_roles WHERE name = ?", (name,))
        bench.connection.execute(
            "DELETE FROM owl_grants WHERE grantee = ? OR (kind = 'ROLE' AND privilege = ?)", (name, name)
        )

    return run


def _known_role(catalog: Catalog, name: str) -> str:
    if name not in catalog.rights.roles and name != PUBLIC:
        raise HanaError(389, f"invalid role name: {hana_identifier(name)}")
    return name


# --- grants -----------------------------------------------------------------------------------------------------------


Grants = list[tuple[Grant, Touch | None]]  # Grants, each with the privilege that its grantor needs (None for a role)


def _clause(reader: TokenReader, stop: str) -> Callable[[Workbench, bool], Grants]:
    """Read privileges or roles, and the object or schema after ON. The returned function raises HanaError 257,
    259, 362, 389."""
    named = reader.several(lambda: _words(reader, stop))
    on_schema, place = reader.take("ON", "SCHEMA"), None
    if on_schema:
        place = Name("", reader.identifier())
    elif reader.take("ON"):
        reader.take("TABLE")
        place = reader.name()

    def run(bench: Workbench, grantable: bool) -> Grants:
        if place is None:
            return [
                (Grant(SYSTEM, name.upper(), grantable=grantable), Touch(name.upper()))
                if name.upper() in rights.SYSTEM_PRIVILEGES
                else (Grant(ROLE, _known_role(bench.catalog, name), grantable=grantable), None)
                for name in named
            ]
        privileges = [privilege.upper() for privilege in named]
        if on_schema:
            schema = bench.catalog.require_schema(place.name)
            wanted = _expanded(privileges, SCHEMA_PRIVILEGES)
            return [(Grant(SCHEMA, one, schema, None, grantable), Touch(one, schema)) for one in wanted]
        relation = bench.catalog.relation(*bench.place(place))
        wanted = _expanded(privileges, OBJECT_PRIVILEGES)
        return [(Grant(OBJECT, one, relation.schema, relation.id, grantable), relation.touch(one)) for one in wanted]

    return run


def _expanded(privileges: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    if list(privileges) == [_ALL]:
        return known
    for privilege in privileges:
        if privilege not in known:
            raise not_supported(f"the privilege {privilege} here")
    return privileges


def _words(reader: TokenReader, stop: str) -> str:
    """Read a privilege of one or two words, or a role."""
    words = [reader.identifier()]
    while not any(reader.peek(end) for end in (",", "ON", stop)):
        words.append(reader.identifier())
    return " ".join(words)


@PARSERS("GRANT")
def _grant(reader: TokenReader) -> Definition:
    clause = _clause(reader, "TO")
    reader.expect("TO")
    grantees = reader.several(reader.identifier)
    grantable = reader.take("WITH", "GRANT", "OPTION") or reader.take("WITH", "ADMIN", "OPTION")

    def run(bench: Workbench) -> None:
        for given, touch in clause(bench, grantable):
            _require_giver(bench, given, touch)
            for grantee in grantees:
                _add_grant(bench, _known_grantee(bench.catalog, grantee), given)

    return run


def _require_giver(bench: Workbench, given: Grant, touch: Touch | None) -> None:
    known = bench.catalog.rights
    if touch is not None:
        known.require(bench.user, [touch], granting=True)
    elif not known.holds_role(bench.user, given.privilege):
        known.require(bench.user, [Touch("ROLE ADMIN")])


def _known_grantee(catalog: Catalog, name: str) -> str:
    return name if name in catalog.rights.roles or name == PUBLIC else _known_user(catalog, name)


def _add_grant(bench: Workbench, grantee: str, given: Grant) -> None:
    """Add a grant. A repeated grant is stored once and keeps the grant option if either had it."""
    known = _take_grant(bench, grantee, given)
    bench.connection.execute(
        "INSERT INTO owl_grants(grantee, kind, privilege, schema, relation, grantor, grantable) VALUES (?,?,?,?,?,?,?)",
        (
            grantee,
            given.kind,
            given.privilege,
            given.schema,
            given.relation,
            bench.user,
            given.grantable or any(grantable for (grantable,) in known),
        ),
    )


def _take_grant(bench: Workbench, grantee: str, given: Grant) -> list[tuple[int]]:
    """Remove a grant; return the grant options of the removed rows."""
    return bench.connection.execute(
        "DELETE FROM owl_grants WHERE grantee = ? AND kind = ? AND privilege = ? AND schema IS ? AND relation IS ?"
        " RETURNING grantable",
        (grantee, given.kind, given.privilege, given.schema, given.relation),
    ).fetchall()


@PARSERS("REVOKE")
def _revoke(reader: TokenReader) -> Definition:
    clause = _clause(reader, "FROM")
    reader.expect("FROM")
    grantees = reader.several(reader.identifier)

    def run(bench: Workbench) -> None:
        for given, touch in clause(bench, False):
            _require_giver(bench, given, touch)
            for grantee in grantees:
                _take_grant(bench, _known_grantee(bench.catalog, grantee), given)

    return run

"""Compute the privileges that a collection needs, and those that a user has beyond them.

Source: SAP HANA Security Guide, *System Privileges*, *Object Privileges*; SQL Reference Guide, *GRANT Statement*.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from connector.errors import PermissionRefused
from connector.hana.connection import HanaPool, quote
from connector.model import CollectionSpec, TableRef, delta_of, log_of

EFFECTIVE = (
    "SELECT DISTINCT USER_NAME, SCHEMA_NAME, OBJECT_NAME, PRIVILEGE FROM SYS.EFFECTIVE_PRIVILEGES "
    "WHERE USER_NAME = CURRENT_USER AND GRANTEE <> 'PUBLIC'"
)
_PLAIN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_ADMINISTRATORS = frozenset({"SYSTEM", "DBADMIN"})  # of on-premise systems and of HANA Cloud
_SYSTEM_SCHEMA = re.compile(r"SYS|_SYS_.*", re.S)  # others, such as SYSTEM or SYS_SALES, may hold business data


@dataclass(frozen=True, slots=True)
class Privilege:
    """Privileges `names` on a table, view or schema. `why`: the reason, for the administrator."""

    names: tuple[str, ...]
    on: TableRef | str
    why: str = field(compare=False)

    @property
    def place(self) -> str:
        """Return the object in the syntax of GRANT."""
        if isinstance(self.on, str):
            return f"SCHEMA {quote(self.on)}"
        return f"{quote(self.on.schema)}.{quote(self.on.name)}"

    def grant(self, grantee: str) -> str:
        """Return the GRANT statement. `grantee`: as returned by `named`."""
        return f"GRANT {', '.join(self.names)} ON {self.place} TO {grantee}"


@contextmanager
def granted(pool: HanaPool, needed: Privilege) -> Iterator[None]:
    """Add the required GRANT statement to the error of a missing privilege."""
    try:
        yield
    except PermissionRefused as error:
        statement = needed.grant(named(pool.options.user) if pool.options.user else "USER")
        raise PermissionRefused(f"{error} Ask an administrator to run: {statement}", code=error.code) from None


def named(user: str) -> str:
    """Return the name of a user or role as SQL. HANA reads an unquoted name as upper case."""
    return quote(user.upper() if _PLAIN_NAME.fullmatch(user) else user)


def selecting(table: TableRef, why: str = "") -> Privilege:
    return Privilege(("SELECT",), table, why)


def reading(spec: CollectionSpec) -> tuple[Privilege, ...]:
    """Return the privileges that a sync of the collection needs at its source."""
    name = spec.name.partition("@")[0]
    found = [selecting(spec.source, f"{name}: reading rows")]
    if spec.changes.method == "log":
        why = f"{name}: the change log (created by owl-sap changes install {name}), which a sync reads and empties"
        found.append(Privilege(("SELECT", "DELETE"), log_of(spec), why))
    if spec.changes.method == "delta" and delta_of(spec) != spec.source:
        found.append(selecting(delta_of(spec), f"{name}: the delta table, which says what changed"))
    return tuple(found)


def installing(spec: CollectionSpec) -> tuple[Privilege, ...]:
    """Return the privileges that `changes install --apply` needs if the user does not own the table."""
    if spec.changes.method != "log":
        return ()
    name = spec.name.partition("@")[0]
    return (
        Privilege(("CREATE ANY",), log_of(spec).schema, f"{name}: creates the log and its triggers"),
        Privilege(("TRIGGER",), spec.source, f"{name}: creates the triggers on the table"),
    )


def creating(schema: str) -> Privilege:
    """Return the privilege that a sync needs in the schema of the vectors if its user does not own the schema. The user
    owns the tables that it creates."""
    return Privilege(("CREATE ANY",), schema, "vectors and their state: creates tables, which it then owns")


def writing(schema: str) -> Privilege:
    """Return the privileges that a sync needs to write into tables of another user."""
    return Privilege(
        ("SELECT", "INSERT", "UPDATE", "DELETE"), schema, "vectors and their state, created by another user"
    )


def searching(schema: str) -> Privilege:
    """Return the privilege that searches need, on the whole schema because every generation has its own table."""
    return Privilege(("SELECT",), schema, "searching vectors of every generation, and reading their state")


Held = tuple[str, TableRef | str | None]
"""One privilege of a user: its name, and the table, schema or (None) system that it is for."""


def effective(pool: HanaPool) -> tuple[str, list[Held]]:
    """Return the pool's user and its privileges, including those by role or ownership, excluding those of PUBLIC."""
    rows = pool.read(EFFECTIVE, (), doing="reading the user's privileges")
    held: list[Held] = []
    for _, schema, name, privilege in rows:
        held.append((privilege, TableRef(schema, name) if schema and name else schema or None))
    return str(rows[0][0]) if rows else "", held


def excess(user: str, held: Sequence[Held], needed: Sequence[Privilege], own: Collection[TableRef | str]) -> list[str]:
    """Return what `user` holds beyond `needed`, one text per object. Ignores system schemas, the user's own schema, and
    the tables and schemas of `own`."""
    found = [f"{user} is an administrator"] if user in _ADMINISTRATORS else []
    allowed = {(name, privilege.on) for privilege in needed for name in privilege.names}
    beyond: dict[str, list[str]] = {}
    for name, on in held:
        schema = on.schema if isinstance(on, TableRef) else on or ""
        free = on in own or schema in own or schema == user or _SYSTEM_SCHEMA.fullmatch(schema)
        if not free and (name, on) not in allowed:
            place = "" if on is None else f" on {'schema ' * isinstance(on, str)}{on}"
            beyond.setdefault(place, []).append(name)
    return found + [", ".join(sorted(names)) + place for place, names in sorted(beyond.items())]

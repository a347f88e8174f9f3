"""What a user of HANA needs to be granted for a collection to work, as one list for doctor, `grants` and `changes
install`; and what he has beyond it. Pure but for one look into the catalogue; grants nothing.

Source: SAP HANA Security Guide, *System Privileges*, *Object Privileges*; SQL Reference Guide, *GRANT Statement*.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from connector.errors import PermissionRefused
from connector.hana.change_log import log_of
from connector.hana.connection import HanaPool, quote
from connector.model import CollectionSpec, TableRef

EFFECTIVE = (
    "SELECT DISTINCT USER_NAME, SCHEMA_NAME, OBJECT_NAME, PRIVILEGE FROM SYS.EFFECTIVE_PRIVILEGES "
    "WHERE USER_NAME = CURRENT_USER AND GRANTEE <> 'PUBLIC'"
)
_PLAIN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_ALMIGHTY = frozenset({"SYSTEM", "DBADMIN"})
"""The administrators that on-premise systems and HANA Cloud come with."""
_OF_HANA_ITSELF = re.compile(r"SYS|_SYS_.*", re.S)
"""Schemas. Others may be called SYSTEM, or SYS_SALES, and hold people's data."""


@dataclass(frozen=True, slots=True)
class Privilege:
    """`names` on a table or view, or on a schema. `why`: for the person who grants it."""

    names: tuple[str, ...]
    on: TableRef | str
    why: str = field(compare=False)

    @property
    def place(self) -> str:
        """As GRANT takes it."""
        if isinstance(self.on, str):
            return f"SCHEMA {quote(self.on)}"
        return f"{quote(self.on.schema)}.{quote(self.on.name)}"

    def grant(self, grantee: str) -> str:
        """`grantee` as `named` gives it."""
        return f"GRANT {', '.join(self.names)} ON {self.place} TO {grantee}"


@contextmanager
def granted(pool: HanaPool, needed: Privilege) -> Iterator[None]:
    """Name in the error of a missing privilege the GRANT that an administrator has to run."""
    try:
        yield
    except PermissionRefused as error:
        statement = needed.grant(named(pool.options.user) if pool.options.user else "USER")
        raise PermissionRefused(f"{error} Ask an administrator to run: {statement}", code=error.code) from None


def named(user: str) -> str:
    """A user or role as SQL takes it: a plain name is upper case in HANA, whatever it was typed as."""
    return quote(user.upper() if _PLAIN_NAME.fullmatch(user) else user)


def selecting(table: TableRef, why: str = "") -> Privilege:
    return Privilege(("SELECT",), table, why)


def reading(spec: CollectionSpec) -> tuple[Privilege, ...]:
    """Of who syncs a collection, at its source."""
    name = spec.name.partition("@")[0]
    found = [selecting(spec.source, f"{name}: reading rows")]
    if spec.changes.method == "log":
        why = f"{name}: the log of changes (made by owl-sap changes install {name}), a queue that a sync empties"
        found.append(Privilege(("SELECT", "DELETE"), log_of(spec), why))
    return tuple(found)


def installing(spec: CollectionSpec) -> tuple[Privilege, ...]:
    """Of who puts the change log of a collection in (`changes install --apply`), where the table is not his own."""
    if spec.changes.method != "log":
        return ()
    name = spec.name.partition("@")[0]
    return (
        Privilege(("CREATE ANY",), log_of(spec).schema, f"{name}: makes the log and its triggers"),
        Privilege(("TRIGGER",), spec.source, f"{name}: puts the triggers on the table"),
    )


def creating(schema: str) -> Privilege:
    """Of who syncs, in the schema of the vectors, where it is not his own. What he makes there is his."""
    return Privilege(("CREATE ANY",), schema, "vectors and their state: makes tables, which are then his own")


def writing(schema: str) -> Privilege:
    """Of who syncs into tables that somebody else has made."""
    return Privilege(("SELECT", "INSERT", "UPDATE", "DELETE"), schema, "vectors and their state, made by another user")


def searching(schema: str) -> Privilege:
    """Of who only searches. On the schema, for every generation has a table of its own."""
    return Privilege(("SELECT",), schema, "searching vectors, of every generation, and asking for their state")


@dataclass(frozen=True, slots=True)
class Held:
    """One privilege that a user has: on a table, on a schema, or (None) of the system."""

    name: str
    on: TableRef | str | None = None


@dataclass(frozen=True, slots=True)
class Holder:
    user: str
    held: tuple[Held, ...]


def effective(pool: HanaPool) -> Holder:
    """What the user of these connections may do, roles and ownership included, and what everybody may excepted."""
    rows = pool.read(EFFECTIVE, (), doing="asking for the user's privileges")
    return Holder(str(rows[0][0]) if rows else "", tuple(_held(*row[1:]) for row in rows))


def _held(schema: str | None, name: str | None, privilege: str) -> Held:
    if not schema:
        return Held(privilege)
    return Held(privilege, TableRef(schema, name) if name else schema)


def excess(holder: Holder, needed: Sequence[Privilege], own: Collection[TableRef | str]) -> list[str]:
    """What `holder` has beyond `needed`, for people, by place. What is in his own schema, and in or on one of `own`, is
    his to do with as he likes."""
    found = [f"{holder.user} is an administrator"] if holder.user in _ALMIGHTY else []
    allowed = {(name, privilege.on) for privilege in needed for name in privilege.names}
    beyond: dict[str, list[str]] = {}
    for each in holder.held:
        schema = each.on.schema if isinstance(each.on, TableRef) else each.on or ""
        free = each.on in own or schema in own or schema == holder.user or _OF_HANA_ITSELF.fullmatch(schema)
        if not free and (each.name, each.on) not in allowed:
            place = "" if each.on is None else f" on {'schema ' * isinstance(each.on, str)}{each.on}"
            beyond.setdefault(place, []).append(each.name)
    return found + [", ".join(sorted(names)) + place for place, names in sorted(beyond.items())]

"""Propose a `[[collections]]` block for a table, with a reason per setting, from the catalogue and counts. Sends no
SQL; a user reviews the block.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import NamedTuple

from connector.discovery.roles import TEXTS, Role, guess, may_hold_change_time, measures
from connector.discovery.sap_tables import LONG_TEXTS, TABLES, UNPACK
from connector.discovery.text_views import create_view
from connector.errors import NoProposal
from connector.hana.catalog import NOT_COMPARABLE
from connector.hana.connection import quote
from connector.hana.delta_table import known_columns, not_deleted
from connector.hana.watermarks import tells_time
from connector.model import Column, Table, TableRef

_MOST_TEXTS = 6
_MOST_METADATA = 8
_MOST_MEASURES = 2
_MOST_CANDIDATES = 4
_LARGE = 500_000  # rows; comparing more in every run takes noticeable time
# A key column that numbers items: useless as a filter.
_ITEM = re.compile(r"\b(number|no|item)\b|NUM$|_ITEM$", re.IGNORECASE)
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
VIEW_NOTE = (
    "The view below gives each row its text in the first language that has one. The order of languages is fixed in the "
    "view, so that every sync reads the same text for any user; SESSION_CONTEXT('LOCALE_SAP') would follow the logon"
)


class Facts(NamedTuple):
    """Facts about a table besides its description.

    `clients`: (client, rows), most rows first; None: not read. `shared`: per candidate key, how many values occur in
    several rows; 0 proves that the key is unique now. `stamps`: the numbers of rows, non-initial values and distinct
    values of `stamp_column`; None: not read. `rows`: HANA's own count. `texts`, `items`, `languages`: as in
    `create_view`. `delta`: the delta table, which may be the table itself.
    """

    unique_keys: Sequence[tuple[str, ...]] = ()
    clients: Sequence[tuple[str, int]] | None = None
    shared: Mapping[tuple[str, ...], int] = {}
    stamps: tuple[int, int, int] | None = None
    rows: int | None = None
    texts: Sequence[Table] = ()
    items: Sequence[Table] = ()
    languages: Sequence[str] = ()
    delta: Table | None = None


Setting = str | list[str] | dict[str, str]


@dataclass(frozen=True, slots=True)
class Proposal:
    """One block. `reasons`: by setting. `guessed`: unproven settings. `notes`: further facts for the user.
    `create_view`: SQL of a view that joins the table with its text tables, if the view has more texts."""

    name: str
    source: TableRef
    key: tuple[str, ...]
    where: str | None
    template: str
    metadata: tuple[str, ...]
    reasons: Mapping[str, str]
    changes: Mapping[str, str] = field(default_factory=lambda: {"method": "full"})
    guessed: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    create_view: str | None = None

    def settings(self) -> dict[str, Setting]:
        """Return the settings in the form of the settings file."""
        block: dict[str, Setting] = {"name": self.name, "source": str(self.source), "key": list(self.key)}
        if self.where is not None:
            block["where"] = self.where
        return block | {"template": self.template, "metadata": list(self.metadata), "changes": dict(self.changes)}

    def comments(self) -> dict[str, str]:
        """Return the reasons; a guess is marked for review."""
        return {name: f"GUESS: {why}" if name in self.guessed else why for name, why in self.reasons.items()}


def propose(table: Table, facts: Facts) -> Proposal:
    """Return the proposal. Raises NoProposal if no column has text that SQL can read, or no column can be a key."""
    name = table.ref.name
    if name in LONG_TEXTS:
        what = f"{name} holds {'the headers of ' * (name == 'STXH')}SAPscript's long texts"
        raise NoProposal(f"{what}, which STXL stores as compressed ABAP clusters, {UNPACK}")
    chosen = _Choices(table, facts)
    texts, template = chosen.template()
    key = chosen.key()
    where, metadata, changes = chosen.where(), chosen.metadata(key, texts), chosen.changes()
    if facts.texts:
        found = ", ".join(str(other.ref) for other in facts.texts)
        chosen.notes.append(f"Texts by language are in: {found}. {VIEW_NOTE}. Create that view and introspect it.")
    if facts.items:
        found = ", ".join(str(other.ref) for other in facts.items)
        chosen.notes.append(f"Item texts are in: {found}; the view below concatenates them.")
    if of_text := TABLES.get(name, {}).get("long_text"):
        chosen.notes.append(f"Long texts written in SAP GUI are compressed in STXL (object {of_text}), {UNPACK}.")
    collection = re.sub(r"[^a-z0-9_]+", "-", name.lower().encode("ascii", "replace").decode()).strip("-_")
    return Proposal(
        name=collection[:100] or "collection",
        source=table.ref,
        key=key,
        where=where,
        template=template,
        metadata=metadata,
        reasons=chosen.reasons,
        changes=changes,
        guessed=frozenset(chosen.guessed),
        notes=tuple(chosen.notes),
        create_view=create_view(table, facts.texts, facts.items, facts.languages),
    )


class _Choices:
    """Chooses the settings one by one and records the reasons."""

    def __init__(self, table: Table, facts: Facts) -> None:
        self._table = table
        self._facts = facts
        # Columns with type and time of a row's last change, if the table is its own delta table.
        own = facts.delta is not None and facts.delta.ref == table.ref
        self._recorded = (known_columns(table) or ()) if own else ()
        self.reasons: dict[str, str] = {}
        self.guessed: set[str] = set()
        self.notes: list[str] = []

    def template(self) -> tuple[tuple[str, ...], str]:
        """Return the text columns, titles first, and their template."""
        table = self._table
        texts = [
            (guess(column), column)
            for role in TEXTS
            for column in table.columns
            if guess(column).role is role and column.name not in table.primary_key
        ]
        if not texts:
            columns = _some([column.name for column in table.columns], 12)
            raise NoProposal(
                f"{table.ref} has no column that looks like text to read (columns: {columns}). Introspect a view "
                "that joins its texts, or write the block by hand"
            )
        used, left = texts[:_MOST_TEXTS], texts[_MOST_TEXTS:]
        reasons = []
        for guessed, column in used:
            comment = f'"{column.comment}", ' if column.comment else ""
            reasons.append(f"{column.name}: {comment}{guessed.why}")
        if left:
            reasons.append(f"left out: {', '.join(column.name for _, column in left)}")
        self.reasons["template"] = "; ".join(reasons)
        if not all(guessed.known for guessed, _ in used):
            self.guessed.add("template")
        template = _slot(used[0][1].name)
        for (before, _), (guessed, column) in pairwise(used):
            both_titles = before.role is guessed.role is Role.TITLE
            template += (", " if both_titles else ". ") + _slot(column.name)
        return tuple(column.name for _, column in used), template

    def key(self) -> tuple[str, ...]:
        table, shared = self._table, self._facts.shared
        if table.primary_key:
            self.reasons["key"] = "the primary key"
            return table.primary_key
        if self._facts.unique_keys:
            self.reasons["key"] = "no primary key; these columns are NOT NULL and have a unique constraint or index"
            return tuple(self._facts.unique_keys[0])
        delta = self._facts.delta
        if table.is_view and delta is not None and delta.primary_key:
            self.reasons["key"] = f"a view has no primary key; this is the primary key of {delta.ref}"
            return delta.primary_key
        candidates = key_candidates(table)
        if not candidates:
            raise NoProposal(
                f"{table.ref} has no primary key, and no column looks like one: write the block by hand, with "
                'key = ["...", ...] naming the columns that identify a row'
            )
        self.guessed.add("key")
        kind = "a view has no primary key" if table.is_view else "no primary key and no unique constraint"
        key = min(candidates, key=lambda tried: shared.get(tried, math.inf))
        if shared.get(key) == 0:
            self.reasons["key"] = f"{kind}; chosen by name, and unique in the current rows"
            return key
        if not shared and len(candidates) > 1 and set(key) < set(candidates[1]):
            key = candidates[1]  # an extra language is safer than rows that share a key
        proof = f"NOT UNIQUE: {shared[key]} of its values belong to several rows" if shared else "NOT PROVEN UNIQUE"
        self.reasons["key"] = (
            f"{kind}; chosen by name only, {proof}: sync refuses a key that two rows share, so check it"
        )
        return key

    def where(self) -> str | None:
        """Return the condition for one client, and for rows that are not marked as deleted."""
        client = self._client()
        if not self._recorded:
            return client
        name = _plain(self._recorded[0])
        why = f"rows that {name} marks as deleted stay in the table"
        self.reasons["where"] = "; ".join(reason for reason in (self.reasons.get("where"), why) if reason)
        alive = not_deleted(name)
        return f"{client} AND {alive}" if client else alive

    def _client(self) -> str | None:
        column = client_column(self._table)
        if column is None:
            return None
        clients = self._facts.clients
        if not clients:
            why = "the table is empty" if clients is not None else "the rows were not read"
            self.notes.append(
                f"{column.name} is SAP's client, and {why}: add where = \"{_plain(column.name)} = '...'\", "
                "or the rows of several clients will mix."
            )
            return None
        client = clients[0][0]
        if len(clients) == 1:
            why = f"{client} is the only client now; the condition excludes clients added later"
        else:
            self.guessed.add("where")
            found = _some([f"{name} ({count} rows)" for name, count in clients], 5)
            why = f"without it the rows of several clients mix; {client} has the most. Found: {found}"
        self.reasons["where"] = why
        literal = client.replace("'", "''")
        return f"{_plain(column.name)} = '{literal}'"

    def metadata(self, key: Sequence[str], texts: Sequence[str]) -> tuple[str, ...]:
        table, client = self._table, client_column(self._table)
        numbers = [name for name in table.primary_key if client is None or name != client.name]
        by_role: dict[Role, list[str]] = {}
        for column in table.columns:
            name = column.name
            item = name in table.primary_key and _ITEM.search(f"{name} {column.comment}")
            # The only number of a row identifies it, so it is useless as a filter.
            if name not in (*texts, *self._recorded) and not item and [name] != numbers:
                by_role.setdefault(guess(column).role, []).append(name)
        wanted = [name for role in (Role.LANGUAGE, Role.CODE, Role.DATE) for name in by_role.get(role, [])]
        pairs = _pairs(table.columns, {*key, *texts})
        most = _MOST_METADATA - (2 * len(pairs) if len(wanted) + 2 * len(pairs) > _MOST_METADATA else 0)
        chosen, left = wanted[:most], wanted[most:]
        reason = "languages, codes and dates, which searches filter by" if chosen else "no column looks like a filter"
        if pairs:
            chosen += [name for pair in pairs for name in pair]
            shown = ", ".join(f"{{{value}}} {{{unit}}}" for value, unit in pairs)
            reason += f"; amounts with their currency and quantities with their unit, which a template shows as {shown}"
        if left:
            reason += f"; left out: {_some(left, _MOST_METADATA)}"
        if persons := by_role.get(Role.PERSON):
            reason += f"; not proposed because they name persons: {', '.join(persons)}"
        if chosen:
            self.guessed.add("metadata")
        self.reasons["metadata"] = reason
        if language := next((name for name in by_role.get(Role.LANGUAGE, ()) if name in key), None):
            self.notes.append(
                f"{language} is part of the key, so each language has its own row. To use one language, add "
                f"{_plain(language)} = 'E' to where. To get one row per key in its best language, introspect the "
                "table that these texts describe: the proposal contains a view."
            )
        return tuple(dict.fromkeys(chosen))

    def changes(self) -> Mapping[str, str]:
        """Return the change method: the delta table if there is one; a watermark only if it looks reliable, because
        changes that do not set it are missed until the next full comparison."""
        table, rows = self._table, self._facts.rows
        if (delta := self._facts.delta) is not None:
            kind, at = known_columns(delta) or ("", "")
            self.guessed.add("changes")
            self.reasons["changes"] = (
                f"{delta.ref} has {kind} and {at}, by which SAP's tools record changes, so a run reads only the rows "
                "recorded since the last one, and sees deletions. Use it only if every change sets them and records "
                f"arrive in the order of {at}: other changes wait for the daily comparison (reconcile)"
            )
            return {"method": "delta", "table": str(delta.ref)}
        column, doubt, why = stamp_column(table), "", ""
        total, filled, distinct = self._facts.stamps or (0, 0, 0)
        if column is None:
            day = next((each.name for each in table.columns if may_hold_change_time(each)), None)
            why = f"{day} is not a UTC time precise to the second" if day else "no column holds the time of a change"
        elif self._facts.stamps is None:
            doubt = "the rows were not read"
        elif filled < total:
            doubt = f"{total - filled:,} of {total:,} rows have no value in it, so it is not maintained"
        elif distinct < 2:
            doubt = "the table is empty" if not total else "the table has only one row" if total == 1 else ""
            doubt = doubt or "all rows have the same value, written by a load and not by changes"
        if column is not None and not doubt:
            self.guessed.add("changes")
            self.reasons["changes"] = (
                f"{column.name} is set in all {total:,} rows and differs between them, so a run reads only newer rows. "
                "Use it only if every change sets it, in UTC: other changes and deletions wait for the daily "
                'comparison (reconcile). If in doubt: changes = { method = "full" }'
            )
            return {"method": "watermark", "column": column.name, "delay": "30s"}
        if column is not None:
            why = f"{column.name} could be the watermark, but {doubt}"
        if rows is not None and rows >= _LARGE:
            why += '. The table is large: hash = "server" leaves unchanged rows in HANA'
            if not table.is_view:
                why += (
                    ', method = "rowid" reads only row ids (a column that SAP does not document), and method = "log" '
                    "needs triggers (owl-sap changes install)"
                )
        self.reasons["changes"] = f"every row is compared: {why}"
        return {"method": "full"}


def stamp_column(table: Table) -> Column | None:
    """Return the possible watermark column: the time of the last change, precise to the second."""
    found = [column for column in table.columns if may_hold_change_time(column) and tells_time(column)]
    return min(found, key=lambda column: not column.name.upper().startswith("LAST"), default=None)


def _pairs(columns: Sequence[Column], taken: set[str]) -> list[tuple[str, str]]:
    """Return pairs of value and unit; each currency or unit once, with its first value."""
    by_unit: dict[str, str] = {}
    for value, unit in measures(columns):
        if not {unit.name, value.name} & taken:
            by_unit.setdefault(unit.name, value.name)
    return [(value, unit) for unit, value in by_unit.items()][:_MOST_MEASURES]


def _some(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (" ..." if len(names) > most else "")


def _slot(name: str) -> str:
    return "{" + name + "}" if _PLAIN_NAME.fullmatch(name) else '{"' + name.replace('"', '""') + '"}'


def _plain(name: str) -> str:
    """Return the name for a readable condition: SAP's own names need no quotes."""
    return name if re.fullmatch(r"[A-Z]+", name) else quote(name)


def client_column(table: Table) -> Column | None:
    return next((column for column in table.columns if guess(column).role is Role.CLIENT), None)


def key_candidates(table: Table) -> list[tuple[str, ...]]:
    """Return up to four possible keys of a table without one in the catalogue, best first.

    Order: a single column named like an id; by name, the client and numbers, without and with languages; all columns
    before the first text.
    """
    usable = [column for column in table.columns if column.type_name not in NOT_COMPARABLE]
    numbers = re.compile(r"(ID|NR|NO|NUM|KEY)$", re.I)
    by_name = [
        column
        for column in usable
        if guess(column).role in (Role.CLIENT, Role.NUMBER, Role.LANGUAGE)
        or (column.type_name in ("INTEGER", "BIGINT") and numbers.search(column.name))
    ]
    leading = list(takewhile(lambda column: guess(column).role not in TEXTS, usable))
    alone = [column for column in usable if re.search(r"(^|_)U?U?ID$|GUID$|Id$", column.name)]
    without = [column for column in by_name if guess(column).role is not Role.LANGUAGE]
    found = (alone[:1], without, by_name, leading if len(leading) <= 8 else [])
    return list(dict.fromkeys(tuple(column.name for column in key) for key in found if key))[:_MOST_CANDIDATES]

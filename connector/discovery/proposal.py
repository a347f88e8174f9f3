"""Propose a `[[collections]]` block for a table, with a reason per setting, from the catalogue and counts. Pure. A user
reviews it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

from connector.discovery.change_advice import FULL, Stamps, advise
from connector.discovery.roles import TEXTS, Role, guess, measures
from connector.discovery.sap_tables import long_text_note, unreadable
from connector.discovery.text_views import TextSources, create_view, nameable
from connector.errors import NoProposal
from connector.hana.catalog import NOT_COMPARABLE
from connector.hana.connection import quote
from connector.model import Column, Table, TableRef

MOST_TEXTS = 6
MOST_METADATA = 8
_MOST_MEASURES = 2
_MOST_CANDIDATES = 4
# A key column that numbers items: useless as a filter.
_ITEM = re.compile(r"\b(number|no|item)\b|NUM$|_ITEM$", re.IGNORECASE)
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a table besides its description.

    `clients`: (client, rows), most rows first; None: not read. `shared`: per tried key, how many values occur in
    several rows; 0 proves it unique now. `stamps`: of a possible watermark. `rows`: HANA's own count. `texts`: text
    tables.
    """

    unique_keys: Sequence[tuple[str, ...]] = ()
    clients: Sequence[tuple[str, int]] | None = None
    shared: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    stamps: Stamps | None = None
    rows: int | None = None
    texts: TextSources = field(default_factory=TextSources)


Setting = str | list[str] | dict[str, str]


@dataclass(frozen=True, slots=True)
class Proposal:
    """One block. `reasons`: by setting. `guessed`: unproven settings. `notes`: further facts for the user.
    `create_view`: SQL of a view that joins the table with its text tables, if that has more texts."""

    name: str
    source: TableRef
    key: tuple[str, ...]
    where: str | None
    template: str
    metadata: tuple[str, ...]
    reasons: Mapping[str, str]
    changes: Mapping[str, str] = field(default_factory=lambda: dict(FULL))
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
    """Return the proposal. Raises NoProposal if no column has text that SQL can read, or none can be a key."""
    if (why := unreadable(table.ref.name)) is not None:
        raise NoProposal(why)
    chosen = _Choices(table, facts)
    texts, template = chosen.template()
    key = chosen.key()
    where = chosen.where()
    metadata = chosen.metadata(key, texts)
    changes = chosen.changes()
    return Proposal(
        name=collection_name(table.ref.name),
        source=table.ref,
        key=key,
        where=where,
        template=template,
        metadata=metadata,
        reasons=chosen.reasons,
        changes=changes,
        guessed=frozenset(chosen.guessed),
        notes=(*chosen.notes, *_about_texts(table, facts)),
        create_view=create_view(table, facts.texts),
    )


def collection_name(table: str) -> str:
    """Return the collection's name: /BIC/AZD00100 -> bic-azd00100."""
    words = re.sub(r"[^a-z0-9_]+", "-", table.lower().encode("ascii", "replace").decode()).strip("-_")
    return words[:100] or "collection"


class _Choices:
    """Makes the choices one by one and records their reasons."""

    def __init__(self, table: Table, facts: Facts) -> None:
        self._table = table
        self._facts = facts
        self.reasons: dict[str, str] = {}
        self.guessed: set[str] = set()
        self.notes: list[str] = []

    def template(self) -> tuple[tuple[str, ...], str]:
        """Return the text columns, titles first, and their template."""
        table = self._table
        found = [(guess(column), column) for column in table.columns if nameable(column)]
        texts = [
            (guessed, column)
            for role in TEXTS
            for guessed, column in found
            if guessed.role is role and column.name not in table.primary_key
        ]
        if not texts:
            raise NoProposal(_no_text(table))
        used, left = texts[:MOST_TEXTS], texts[MOST_TEXTS:]
        reason = "; ".join(f"{column.name}: {_told(column)}{guessed.why}" for guessed, column in used)
        if left:
            reason += f"; left out: {', '.join(column.name for _, column in left)}"
        self.reasons["template"] = reason
        if not all(guessed.known for guessed, _ in used):
            self.guessed.add("template")
        template = _slot(used[0][1].name)
        for (before, _), (guessed, column) in pairwise(used):
            both_titles = before.role is guessed.role is Role.TITLE
            template += (", " if both_titles else ". ") + _slot(column.name)
        if any(guessed.role is Role.LONG_TEXT for guessed, _ in used):
            self.notes.append(
                "Long texts are cut into chunks of what the model takes; "
                "chunk = { max_tokens = 128 } would make shorter ones."
            )
        return tuple(column.name for _, column in used), template

    def key(self) -> tuple[str, ...]:
        table, facts = self._table, self._facts
        if table.primary_key:
            self.reasons["key"] = "the primary key"
            return table.primary_key
        if facts.unique_keys:
            self.reasons["key"] = "no primary key; these columns are NOT NULL and have a unique constraint or index"
            return tuple(facts.unique_keys[0])
        candidates = key_candidates(table)
        if not candidates:
            raise NoProposal(
                f"{table.ref} has no primary key, and no column looks like one: write the block by hand, with "
                'key = ["...", ...] naming the columns that identify a row'
            )
        self.guessed.add("key")
        kind = "a view has no primary key" if table.is_view else "no primary key and no unique constraint"
        for key in candidates:
            if facts.shared.get(key) == 0:
                self.reasons["key"] = f"{kind}; chosen by name, and unique in the rows that are there now"
                return key
        key = min(candidates, key=lambda tried: facts.shared.get(tried, 0)) if facts.shared else _likeliest(candidates)
        shared = facts.shared.get(key)
        told = "NOT PROVEN UNIQUE" if shared is None else f"NOT UNIQUE: {shared} of its values belong to several rows"
        self.reasons["key"] = (
            f"{kind}; chosen by name only, {told}: sync refuses a key that two rows share, so check it"
        )
        return key

    def where(self) -> str | None:
        column = client_column(self._table)
        if column is None:
            return None
        clients = self._facts.clients
        if not clients:
            why = "the table is empty" if clients is not None else "the rows were not looked at"
            self.notes.append(
                f"{column.name} is SAP's client and {why}: add where = \"{_plain(column.name)} = '...'\", "
                "or several clients will mix."
            )
            return None
        client = clients[0][0]
        if len(clients) > 1:
            self.guessed.add("where")
        if len(clients) == 1:
            why = f"{client} is the only client now; the condition keeps others out that may come"
        else:
            others = ", ".join(f"{name} ({count} rows)" for name, count in clients[:5])
            why = f"without it clients mix; {client} has most rows. There are: {others}" + (
                " ..." if len(clients) > 5 else ""
            )
        self.reasons["where"] = why
        literal = client.replace("'", "''")
        return f"{_plain(column.name)} = '{literal}'"

    def metadata(self, key: Sequence[str], texts: Sequence[str]) -> tuple[str, ...]:
        table = self._table
        by_role: dict[Role, list[str]] = {}
        for column in table.columns:
            numbered = column.name in table.primary_key and _ITEM.search(f"{column.name} {column.comment}")
            if nameable(column) and column.name not in texts and not numbered and column.name != _own_number(table):
                by_role.setdefault(guess(column).role, []).append(column.name)
        wanted = [name for role in (Role.LANGUAGE, Role.CODE, Role.DATE) for name in by_role.get(role, [])]
        pairs = _pairs(table.columns, {*key, *texts})
        most = MOST_METADATA - (2 * len(pairs) if len(wanted) + 2 * len(pairs) > MOST_METADATA else 0)
        chosen, left = wanted[:most], wanted[most:]
        reason = "languages, codes and dates: what searches filter by" if chosen else "no column looks like a filter"
        if pairs:
            chosen += [name for pair in pairs for name in pair]
            shown = ", ".join(f"{{{value}}} {{{unit}}}" for value, unit in pairs)
            reason += f"; amounts with their currency and quantities with their unit, which a template shows as {shown}"
        if left:
            reason += f"; left out: {', '.join(left[:MOST_METADATA])}" + (" ..." if len(left) > MOST_METADATA else "")
        persons = by_role.get(Role.PERSON, [])
        if persons:
            reason += f"; not proposed, they name persons: {', '.join(persons)}"
        if chosen:
            self.guessed.add("metadata")
        self.reasons["metadata"] = reason
        languages = by_role.get(Role.LANGUAGE, [])
        if any(name in key for name in languages):
            self.notes.append(
                f"{languages[0]} is part of the key: there is one row for each language. For one language add "
                f"{_plain(languages[0])} = 'E' to where; for one row each with the best language there is, introspect "
                "the table whose texts these are, which shows a view."
            )
        return tuple(dict.fromkeys(chosen))

    def changes(self) -> Mapping[str, str]:
        advice = advise(self._table, self._facts.stamps, self._facts.rows)
        self.reasons["changes"] = advice.why
        if advice.guess:
            self.guessed.add("changes")
        return advice.changes


def _pairs(columns: Sequence[Column], taken: set[str]) -> list[tuple[str, str]]:
    """Return each currency or unit once, with the first value that it belongs to."""
    found = [(value.name, unit.name) for value, unit in measures(columns) if nameable(value) and nameable(unit)]
    by_unit = {unit: value for value, unit in reversed(found) if not {unit, value} & taken}
    return [(value, unit) for unit, value in reversed(by_unit.items())][:_MOST_MEASURES]


def _told(column: Column) -> str:
    return f'"{column.comment}", ' if column.comment else ""


def _no_text(table: Table) -> str:
    columns = ", ".join(column.name for column in table.columns[:12]) + (" ..." if len(table.columns) > 12 else "")
    return (
        f"{table.ref} has no column that looks like text for people (columns: {columns}). Introspect a view that joins "
        "its texts, or write the block by hand"
    )


def _slot(name: str) -> str:
    return "{" + name + "}" if _PLAIN_NAME.fullmatch(name) else '{"' + name.replace('"', '""') + '"}'


def _plain(name: str) -> str:
    """Return the name for a readable condition: SAP's own names need no quotes."""
    return name if re.fullmatch(r"[A-Z]+", name) else quote(name)


# ------------------------------------------------------------------------------------------------------ keys, clients


def client_column(table: Table) -> Column | None:
    return next((column for column in table.columns if guess(column).role is Role.CLIENT), None)


def _own_number(table: Table) -> str | None:
    """Return the column that identifies a row within its client: useless as a filter."""
    client = client_column(table)
    rest = [name for name in table.primary_key if client is None or name != client.name]
    return rest[0] if len(rest) == 1 else None


def key_candidates(table: Table) -> list[tuple[str, ...]]:
    """Return up to four possible keys of a table without one in the catalogue, best first.

    Order: a single column named like an id; by name, the client and numbers, without and with languages; all columns
    before the first text.
    """
    usable = [column for column in table.columns if column.type_name not in NOT_COMPARABLE and nameable(column)]
    numbers = re.compile(r"(ID|NR|NO|NUM|KEY)$", re.I)
    by_name = tuple(
        column.name
        for column in usable
        if guess(column).role in (Role.CLIENT, Role.NUMBER, Role.LANGUAGE)
        or (column.type_name in ("INTEGER", "BIGINT") and numbers.search(column.name))
    )
    leading = tuple(column.name for column in takewhile(lambda column: guess(column).role not in TEXTS, usable))
    leading = leading if len(leading) <= 8 else ()
    alone = [(column.name,) for column in usable if re.search(r"(^|_)U?U?ID$|GUID$|Id$", column.name)]
    languages = {column.name for column in usable if guess(column).role is Role.LANGUAGE}
    without = tuple(name for name in by_name if name not in languages)
    found = [key for key in (*alone[:1], without, by_name, leading) if key]
    return list(dict.fromkeys(found))[:_MOST_CANDIDATES]


def _likeliest(candidates: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Choose without reading rows: an extra language is safer than rows that share a key."""
    first, *others = candidates
    return next((key for key in others[:1] if set(first) < set(key)), first)


# ---------------------------------------------------------------------------------------------------------- text tables


def _about_texts(table: Table, facts: Facts) -> list[str]:
    notes = []
    if facts.texts.texts:
        names = ", ".join(str(other.ref) for other in facts.texts.texts)
        notes.append(
            f"Texts of {table.ref} in several languages are in: {names}. {VIEW_TOLD}: make it and introspect that."
        )
    if facts.texts.items:
        names = ", ".join(str(other.ref) for other in facts.texts.items)
        notes.append(f"Items with texts of their own are in: {names}; the view below concatenates them.")
    if (note := long_text_note(table.ref.name)) is not None:
        notes.append(note)
    return notes


VIEW_TOLD = (
    "The view below gives each row the text of the first language that has one (fixed in it, because every sync must "
    "read the same text for any user; SESSION_CONTEXT('LOCALE_SAP') would follow the logon)"
)

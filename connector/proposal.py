"""A first `[[collections]]` block for a table, each choice with its reason, from what catalogue and counts say.
Pure: asks nothing itself. A proposal is for a person to read and change; nothing is decided by it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from connector.catalog import NOT_COMPARABLE
from connector.errors import ConfigurationError, NoProposal
from connector.hana import quote
from connector.model import Column, Table, TableRef
from connector.roles import TEXTS, Role, guess, tells_changes
from connector.watermarks import tells_time

MOST_TEXTS = 6
MOST_METADATA = 8
_MOST_CANDIDATES = 3
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TEXT_TABLES = {"MARA": "MAKT", "EQUI": "EQKT", "T001W": "T001W", "CSKS": "CSKT", "CEPC": "CEPCT", "IFLOT": "IFLOTX"}
"""Pairs whose names follow no rule."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a table besides its description.

    `clients`: (client, rows), most rows first; None: not asked. `shared`: for each key that was tried, how many of its
    values belong to more than one row; 0 proves it unique now. `text_tables`: tables with the same primary key and a
    language.
    """

    unique_keys: Sequence[tuple[str, ...]] = ()
    clients: Sequence[tuple[str, int]] | None = None
    shared: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    text_tables: Sequence[Table] = ()


@dataclass(frozen=True, slots=True)
class Proposal:
    """One block. `reasons`: by setting, why it is so; `notes`: what else a person should know before using it.

    `create_view`: SQL of a view that joins the table with its text tables, where that would give more to find.
    """

    name: str
    source: TableRef
    key: tuple[str, ...]
    where: str | None
    template: str
    metadata: tuple[str, ...]
    reasons: Mapping[str, str]
    notes: tuple[str, ...] = ()
    create_view: str | None = None

    def settings(self) -> dict[str, str | list[str]]:
        """As they stand in the settings file."""
        block: dict[str, str | list[str]] = {"name": self.name, "source": str(self.source), "key": list(self.key)}
        if self.where is not None:
            block["where"] = self.where
        return block | {"template": self.template, "metadata": list(self.metadata)}


def propose(table: Table, facts: Facts) -> Proposal:
    """Raises NoProposal when no column holds text or none could be a key."""
    chosen = _Choices(table, facts)
    texts, template = chosen.template()
    key = chosen.key()
    where = chosen.where()
    metadata = chosen.metadata(key, texts)
    chosen.changes()
    return Proposal(
        name=collection_name(table.ref.name),
        source=table.ref,
        key=key,
        where=where,
        template=template,
        metadata=metadata,
        reasons=chosen.reasons,
        notes=(*chosen.notes, *_about_texts(table, facts)),
        create_view=create_view(table, facts.text_tables),
    )


def collection_name(table: str) -> str:
    """/BIC/AZD00100 -> bic-azd00100"""
    words = re.sub(r"[^a-z0-9_]+", "-", table.lower().encode("ascii", "replace").decode()).strip("-_")
    return words[:100] or "collection"


class _Choices:
    """The choices one after the other; each leaves its reason."""

    def __init__(self, table: Table, facts: Facts) -> None:
        self._table = table
        self._facts = facts
        self.reasons: dict[str, str] = {}
        self.notes: list[str] = []

    def template(self) -> tuple[tuple[str, ...], str]:
        """The text columns, titles first, and the template made of them."""
        table = self._table
        found = [(guess(column), column) for column in table.columns if _nameable(column)]
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
        kind = "a view has no primary key" if table.is_view else "no primary key and no unique constraint"
        for key in candidates:
            if facts.shared.get(key) == 0:
                self.reasons["key"] = f"{kind}; chosen by name, and unique in the rows that are there now"
                return key
        key = min(candidates, key=lambda tried: facts.shared.get(tried, 0))
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
            if _nameable(column) and column.name not in texts:
                by_role.setdefault(guess(column).role, []).append(column.name)
        wanted = [name for role in (Role.LANGUAGE, Role.CODE, Role.DATE) for name in by_role.get(role, [])]
        chosen, left = wanted[:MOST_METADATA], wanted[MOST_METADATA:]
        persons = by_role.get(Role.PERSON, [])
        reason = "languages, codes and dates: what searches filter by" if chosen else "no column looks like a filter"
        if left:
            reason += f"; left out: {', '.join(left[:MOST_METADATA])}" + (" ..." if len(left) > MOST_METADATA else "")
        if persons:
            reason += f"; not proposed, they name persons: {', '.join(persons)}"
        self.reasons["metadata"] = reason
        languages = by_role.get(Role.LANGUAGE, [])
        if any(name in key for name in languages):
            self.notes.append(f"{languages[0]} is part of the key: there is one row for each language.")
        return tuple(chosen)

    def changes(self) -> None:
        columns = [column for column in self._table.columns if tells_changes(column)]
        if not columns:
            return
        told = (
            f"{', '.join(column.name for column in columns[:3])} may say when a row changed, often to the day only and "
            'not always kept up: sync does not rely on it and compares every row (changes = { method = "full" }, the '
            "default)."
        )
        fits = next((column.name for column in columns if tells_time(column)), None)
        if fits is not None:
            name = json.dumps(fits, ensure_ascii=False)
            told += (
                " If every change sets it, in UTC, a run need read only what is new: changes = { method = "
                f'"watermark", column = {name}, delay = "30s" }}; deletions then wait for the daily comparison.'
            )
        self.notes.append(told)


def _told(column: Column) -> str:
    return f'"{column.comment}", ' if column.comment else ""


def _no_text(table: Table) -> str:
    columns = ", ".join(column.name for column in table.columns[:12]) + (" ..." if len(table.columns) > 12 else "")
    return (
        f"{table.ref} has no column that looks like text for people (columns: {columns}). Introspect a view that joins "
        "its texts, or write the block by hand"
    )


def _nameable(column: Column) -> bool:
    """Names that no statement of ours could hold are left out."""
    try:
        quote(column.name)
    except ConfigurationError:
        return False
    return True


def _slot(name: str) -> str:
    return "{" + name + "}" if _PLAIN_NAME.fullmatch(name) else '{"' + name.replace('"', '""') + '"}'


def _plain(name: str) -> str:
    """For a condition that a person reads: SAP's own names need no quotes."""
    return name if re.fullmatch(r"[A-Z]+", name) else quote(name)


# ------------------------------------------------------------------------------------------------------ keys, clients


def client_column(table: Table) -> Column | None:
    return next((column for column in table.columns if guess(column).role is Role.CLIENT), None)


def key_candidates(table: Table) -> list[tuple[str, ...]]:
    """Columns that may identify a row where nothing in the catalogue says so, best first; at most three.

    By name: the client, numbers and languages; then all before the first text; then one column alone that is called
    like an id.
    """
    usable = [column for column in table.columns if column.type_name not in NOT_COMPARABLE and _nameable(column)]
    by_name = tuple(column.name for column in usable if _identifies(column))
    leading = tuple(column.name for column in _before_text(usable))
    alone = [(column.name,) for column in usable if re.search(r"(^|_)U?U?ID$|GUID$|Id$", column.name)]
    found = [key for key in (*alone[:1], by_name, leading) if key]
    return list(dict.fromkeys(found))[:_MOST_CANDIDATES]


def _identifies(column: Column) -> bool:
    integer = column.type_name in ("INTEGER", "BIGINT") and bool(re.search(r"(ID|NR|NO|NUM|KEY)$", column.name, re.I))
    return integer or guess(column).role in (Role.CLIENT, Role.NUMBER, Role.LANGUAGE)


def _before_text(columns: Iterable[Column]) -> list[Column]:
    leading: list[Column] = []
    for column in columns:
        if guess(column).role in TEXTS:
            break
        leading.append(column)
    return leading if len(leading) <= 8 else []


# ---------------------------------------------------------------------------------------------------------- text tables


def is_text_table(table: Table, key: Sequence[str]) -> bool:
    """Has this table the primary key `key` plus one language, and a text?"""
    rest = [name for name in table.primary_key if name not in key]
    if len(table.primary_key) != len(key) + 1 or len(rest) != 1:
        return False
    language = table.column(rest[0])
    if language is None or guess(language).role is not Role.LANGUAGE:
        return False
    return any(guess(column).role in TEXTS for column in table.columns)


def nearest_first(table: str, others: Iterable[str]) -> list[str]:
    """Names of text tables, the likeliest one first: known pairs, then MARAT or MART for MARA, then the alphabet."""
    likely = [_TEXT_TABLES.get(table), f"{table}T", f"{table[:-1]}T", f"{table}_TEXTS", f"{table}_texts"]
    return sorted(others, key=lambda name: (likely.index(name) if name in likely else len(likely), name))


def _about_texts(table: Table, facts: Facts) -> list[str]:
    if not facts.text_tables:
        return []
    names = ", ".join(str(other.ref) for other in facts.text_tables)
    return [
        f"Texts of {table.ref} in several languages stand in: {names}. To search them together with its columns, make "
        "the view below and introspect that."
    ]


def create_view(table: Table, text_tables: Sequence[Table]) -> str | None:
    """SQL of a view over the table and its text tables, one row per key and language; None without text tables.

    The first text table decides which languages a row has; the others may lack a text.
    """
    if not text_tables or not table.primary_key:
        return None
    first = text_tables[0]
    (language,) = (name for name in first.primary_key if name not in table.primary_key)
    own = [column for column in table.columns if guess(column).role is not Role.PERSON and _nameable(column)]
    items = [f"m.{quote(column.name)}" for column in own]
    items.insert(len(table.primary_key), f"t1.{quote(language)}")
    taken = {column.name for column in own} | {language}
    joins = []
    for number, other in enumerate(text_tables, 1):
        alias = f"t{number}"
        texts = [c.name for c in other.columns if guess(c).role in TEXTS and c.name not in taken and _nameable(c)]
        taken.update(texts)
        items += [f"{alias}.{quote(name)}" for name in texts]
        conditions = [f"{alias}.{quote(name)} = m.{quote(name)}" for name in table.primary_key]
        if number > 1:
            (its_language,) = (name for name in other.primary_key if name not in table.primary_key)
            conditions.append(f"{alias}.{quote(its_language)} = t1.{quote(language)}")
        kind = "INNER" if number == 1 else "LEFT OUTER"
        joins.append(f"  {kind} JOIN {_place(other.ref)} {alias} ON {' AND '.join(conditions)}")
    view = TableRef(table.ref.schema, f"V_{table.ref.name}"[:127])
    lines = [f"CREATE VIEW {_place(view)} AS SELECT {', '.join(items)}", f"  FROM {_place(table.ref)} m", *joins]
    return "\n".join(lines)


def _place(ref: TableRef) -> str:
    return f"{quote(ref.schema)}.{quote(ref.name)}"

"""What people call columns and codes: HANA's comments, and the texts of SAP's text tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from connector.discovery.roles import Role, guess
from connector.discovery.sap_tables import VALUES
from connector.discovery.text_views import languages_for
from connector.hana import catalog
from connector.hana.connection import HanaPool, quote
from connector.hana.statement import place
from connector.model import Table, TableRef

_CLIENT = re.compile(r"""(?:"MANDT"|\bMANDT)\s*=\s*'(\d{3})'""")


def labels(pool: HanaPool, table: Table) -> dict[str, str]:
    """Return the comments of columns, by name. The columns of a view have rarely one of their own: they get that of
    their namesakes in the schema's tables."""
    found = {column.name: column.comment.strip() for column in table.columns if column.comment.strip()}
    bare = [column.name for column in table.columns if column.name not in found]
    if table.is_view and bare:
        found |= {name: text.strip() for name, text in catalog.comments_by_name(pool, table.ref.schema, bare).items()}
    return found


def value_texts(
    pool: HanaPool, schema: str, column: str, codes: Sequence[str], *, where: str | None = None
) -> dict[str, str]:
    """Return the texts of codes of a column with a known text table, in English, else German. `where`: the
    collection's condition, which may name one client. A code whose texts differ, between clients for example, is left
    out. Raises UnknownTable, PermissionRefused."""
    if column not in VALUES or not codes:
        return {}
    name, code, text = VALUES[column]
    table = catalog.describe(pool, TableRef(schema, name))
    if table.column(code) is None or table.column(text) is None:
        return {}
    roles = {guess(each).role: each for each in table.columns if each.name != code}
    language, client = roles.get(Role.LANGUAGE), _CLIENT.search(where or "")
    chain = [] if language is None else languages_for(language, ())
    spoken = "''" if language is None else quote(language.name)
    conditions, values = [f"{quote(code)} IN ({', '.join('?' * len(codes))})"], list(codes)
    if language is not None:
        conditions.append(f"{spoken} IN ({', '.join('?' * len(chain))})")
        values += chain
    if client is not None and Role.CLIENT in roles:
        conditions.append(f"{quote(roles[Role.CLIENT].name)} = ?")
        values.append(client[1])
    sql = f"SELECT {quote(code)}, {spoken}, {quote(text)} FROM {place(table.ref)} WHERE {' AND '.join(conditions)}"  # noqa: S608
    found: dict[tuple[str, str], set[str]] = {}
    for key, tongue, said in pool.read(sql, values, doing=f"reading the texts of {column}"):
        if said and said.strip():
            found.setdefault((key, tongue), set()).add(said.strip())
    texts: dict[str, str] = {}
    for (key, _), said in sorted(found.items(), key=lambda each: chain.index(each[0][1]) if chain else 0):
        if len(said) == 1:
            texts.setdefault(key, *said)
    return texts

"""Texts of codes from SAP's text tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from connector.discovery.roles import Role, guess
from connector.discovery.sap_tables import VALUES
from connector.discovery.text_views import languages_for
from connector.hana import catalog
from connector.hana.connection import HanaPool, quote
from connector.hana.statement import place
from connector.model import TableRef

_CLIENT = re.compile(r"""(?:"MANDT"|\bMANDT)\s*=\s*'(\d{3})'""")


def value_texts(
    pool: HanaPool, schema: str, column: str, codes: Sequence[str], *, where: str | None = None, whole: bool = True
) -> dict[str, str]:
    """Return the texts of codes of a column in `VALUES`, in English, else German. `where`: the collection's condition,
    which may name one client. Without one, a code whose texts differ between clients is left out, and all codes are
    unless the caller sees the `whole` collection: a text could come from another client. Raises UnknownTable,
    PermissionRefused."""
    if not codes:
        return {}
    name, code, text = VALUES[column]
    table = catalog.describe(pool, TableRef(schema, name))
    roles = {guess(each).role: each for each in table.columns if each.name != code}
    conditions, values = [f"{quote(code)} IN ({', '.join('?' * len(codes))})"], list(codes)
    spoken, chain = "''", [""]
    if language := roles.get(Role.LANGUAGE):
        spoken, chain = quote(language.name), languages_for(language, ())
        conditions.append(f"{spoken} IN ({', '.join('?' * len(chain))})")
        values += chain
    if client := roles.get(Role.CLIENT):
        if named := _CLIENT.search(where or ""):
            conditions.append(f"{quote(client.name)} = ?")
            values.append(named[1])
        elif not whole:
            return {}
    sql = f"SELECT {quote(code)}, {spoken}, {quote(text)} FROM {place(table.ref)} WHERE {' AND '.join(conditions)}"  # noqa: S608
    found: dict[tuple[str, str], set[str]] = {}
    for key, tongue, said in pool.read(sql, values, doing=f"reading the texts of {column}"):
        if said and said.strip():
            found.setdefault((tongue, key), set()).add(said.strip())
    texts: dict[str, str] = {}
    for (_, key), said in sorted(found.items(), key=lambda each: chain.index(each[0][0])):
        if len(said) == 1:
            texts.setdefault(key, *said)
    return texts

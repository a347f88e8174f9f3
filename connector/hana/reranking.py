"""Score texts with a reranking model inside HANA (CROSS_ENCODE)."""

from __future__ import annotations

from collections.abc import Sequence

from connector.errors import ConfigurationError, PermissionRefused, StatementFailed
from connector.hana.connection import HanaPool

_TEXTS = 250  # of one statement
_LONGEST = 5000  # UTF-16 units of an NVARCHAR; models read less of a text
_UNKNOWN_MODEL = 8  # the emulator's code; HANA's own is not documented
_MISSING = (_UNKNOWN_MODEL, 257, 258, 328)  # a syntax error, no privilege, an unknown function


def cross_encode(pool: HanaPool, model: str, query: str, texts: Sequence[str]) -> list[float | None]:
    """Return the model's score of each text, higher is better; None where HANA gives none. Only the first 5,000 units
    of a text count. Raises ConfigurationError if this HANA or user has no CROSS_ENCODE or no such model: no system view
    shows it, so the statement itself asks; other errors as they are."""
    found: list[float | None] = []
    for start in range(0, len(texts), _TEXTS):
        some = [_cut(text) for text in texts[start : start + _TEXTS]]
        row = 'SELECT {} AS "PLACE", TO_NVARCHAR(?) AS "TEXT" FROM DUMMY'
        rows = " UNION ALL ".join(map(row.format, range(len(some))))
        sql = f'SELECT "PLACE", CROSS_ENCODE("TEXT", ?, ?) OVER() AS "SCORE" FROM ({rows})'  # noqa: S608 - numbers only
        try:
            scores: dict[int, float | None] = dict(
                pool.read(sql, (_cut(query), model, *some), doing="reranking in HANA")
            )
        except (PermissionRefused, StatementFailed) as error:
            if error.code not in _MISSING:
                raise
            raise ConfigurationError(
                f'HANA refuses CROSS_ENCODE with the model "{model}" (code {error.code}): it needs HANA Cloud with '
                "Natural Language Processing (NLP) switched on, and the exact name of a model",
                code=error.code,
            ) from None
        found += [scores.get(place) for place in range(len(some))]
    return found


def _cut(text: str) -> str:
    return text.encode("utf-16-le", "replace")[: 2 * _LONGEST].decode("utf-16-le", "ignore")

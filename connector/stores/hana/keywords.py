"""Keyword search in HANA: BM25 computed in SQL over VEC_TEXT. Words are found by HANA's text search, or by LIKE if HANA
rejects text search. Word weights count only the rows that the caller may see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from connector.errors import StatementFailed
from connector.hana.connection import HanaPool
from connector.stores import filters
from connector.stores.hana.tables import VectorSql
from connector.stores.words import LENGTH_SHARE, SATURATION, Word, weight, words, worth_it

# The parts put together below are quoted identifiers and constants; values are always bound.
# ruff: noqa: S608


def _holds(word: Word, full_text: bool) -> str:
    """Return a condition on one text, with the parameters of `_parameters`."""
    if not full_text:
        return 'LOWER("VEC_TEXT") LIKE TO_NVARCHAR(?)'
    one = "SCORE(TO_NVARCHAR(?) IN (\"VEC_TEXT\" EXACT SEARCH MODE 'text')) > 0"
    return one if len(word.alternatives) == 1 else f"({' OR '.join([one] * len(word.alternatives))})"


def _parameters(word: Word, full_text: bool) -> list[str]:
    if full_text:
        return [f'"{phrase}"' for phrase in word.alternatives]  # a phrase for HANA, without operators
    return [f"%{word.alternatives[0].lower().replace(' ', '_')}%"]


@dataclass(frozen=True, slots=True)
class KeywordQuery:
    """A search text prepared for one table: words to search, their weights, and the average text length. `full_text`:
    use SCORE (whole words); otherwise LIKE, which also finds parts of words."""

    table: VectorSql
    full_text: bool
    words: tuple[Word, ...]
    weights: tuple[float, ...]
    average: float

    def statement(self, count: int, where: filters.Compiled) -> tuple[str, list[Any]]:
        """Return the statement for the best `count` records with their scores, and its parameters."""
        head, source = self.table.projected(where.projection)
        holds = [_holds(word, self.full_text) for word in self.words]
        every = [value for word in self.words for value in _parameters(word, self.full_text)]
        values: list[Any] = []
        for word, worth in zip(self.words, self.weights, strict=True):
            values += [*_parameters(word, self.full_text), worth]
        values.append(self.average)
        weights = " + ".join(f"CASE WHEN {held} THEN TO_DOUBLE(?) ELSE 0 END" for held in holds)
        length = f'{1 - LENGTH_SHARE} + {LENGTH_SHARE} * LENGTH("VEC_TEXT") / TO_DOUBLE(?)'
        score = f"({weights}) / (1 + {SATURATION} * ({length}))"
        if len(holds) > 1:  # a text with all words must rank above any text without one of them
            score += f" + CASE WHEN {' AND '.join(holds)} THEN TO_DOUBLE(?) ELSE 0 END"
            values += [*every, sum(self.weights)]
        any_word = " OR ".join(holds)
        condition = f"({any_word}) AND ({where.sql})" if where.sql else any_word
        sql = (
            f'{head}SELECT TOP {count:d} "ID", "SRC_KEY", "CHUNK_NO", "VEC_TEXT", "VEC_META", '
            f'{score} AS "SCORE" FROM {source} WHERE {condition} ORDER BY "SCORE" DESC'
        )
        return sql, [*values, *every, *where.parameters]


class Keywords:
    """Word searches over the vector tables of one store."""

    def __init__(self, pool: HanaPool) -> None:
        self._pool = pool
        self._full_text: bool | None = None

    def query(self, table: VectorSql, text: str, within: filters.Compiled) -> KeywordQuery | None:
        """Count the texts with each word among the rows that match `within`, so that other rows affect neither scores
        nor order. Return None if there is nothing to search."""
        if self._full_text is None:
            self._full_text = self._supported(table)
        full_text, wanted, doing = self._full_text, words(text), "searching by words"
        where = f" WHERE {within.sql}" if within.sql else ""
        sql = f'SELECT COUNT("VEC_TEXT"), AVG(TO_DOUBLE(LENGTH("VEC_TEXT"))) FROM {table.table}{where}'
        texts, average = self._pool.read(sql, within.parameters, doing=doing)[0]
        if not wanted or not texts:
            return None
        counts: list[int] = []
        seen = f" AND ({within.sql})" if within.sql else ""
        for word in wanted:
            sql = f"SELECT COUNT(*) FROM {table.table} WHERE {_holds(word, full_text)}{seen}"
            parameters = (*_parameters(word, full_text), *within.parameters)
            counts.append(self._pool.read(sql, parameters, doing=doing)[0][0])
        places = worth_it(wanted, counts, texts)
        weights = tuple(weight(counts[place], texts) for place in places)
        average = max(float(average or 0), 1.0)
        return KeywordQuery(table, full_text, tuple(wanted[place] for place in places), weights, average)

    def _supported(self, table: VectorSql) -> bool:
        """Return whether HANA can search VEC_TEXT by words. No system view shows this, so run a search."""
        probe = Word(("owl",))
        query = KeywordQuery(table, True, (probe, probe), (1.0, 1.0), 1.0)
        sql, values = query.statement(1, filters.Compiled("", ()))
        try:
            self._pool.read(sql, values, doing="asking HANA whether it searches texts")
        except StatementFailed:
            return False
        return True

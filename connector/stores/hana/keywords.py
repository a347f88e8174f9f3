"""Keyword search in HANA: BM25 computed by HANA over VEC_TEXT, with its text search for the words, or LIKE where HANA
rejects that. Word weights count only the rows that the caller may see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from connector.errors import StatementFailed
from connector.hana.connection import HanaPool
from connector.stores import filters
from connector.stores.hana.tables import VectorSql
from connector.stores.words import LENGTH_SHARE, SATURATION, Word, weight, words, worth_it

# The parts put together below are quoted identifiers and constants; values are always bound.
# ruff: noqa: S608


@dataclass(frozen=True, slots=True)
class KeywordSql:
    """Statements about the words of one vector table. `full_text`: by SCORE (whole words); otherwise by LIKE, which
    finds words inside of words too."""

    table: VectorSql
    full_text: bool

    def lengths(self, within: str) -> str:
        """Return the number of texts and their average length in characters. Parameters: those of `within`, a condition
        or ""."""
        where = f" WHERE {within}" if within else ""
        return f'SELECT COUNT("VEC_TEXT"), AVG(TO_DOUBLE(LENGTH("VEC_TEXT"))) FROM {self.table.table}{where}'

    def count(self, word: Word, within: str) -> str:
        """Parameters: those of `parameters`, then those of `within`."""
        seen = f" AND ({within})" if within else ""
        return f"SELECT COUNT(*) FROM {self.table.table} WHERE {self._holds(word)}{seen}"

    def parameters(self, word: Word) -> list[str]:
        if self.full_text:
            return [f'"{phrase}"' for phrase in word.alternatives]  # HANA's form of a phrase; without AND, OR, - and *
        return [f"%{word.alternatives[0].lower().replace(' ', '_')}%"]

    def search(self, count: int, found: Sequence[Word], where: filters.Compiled) -> str:
        """Parameters: for each word those of `parameters` and its weight; the average length; for several words, those
        of all words and the bonus of a text with all of them; those of all words; those of `where`."""
        source = "intermediate_result" if where.projection else self.table.table
        head = (
            f"WITH intermediate_result AS (SELECT *, {where.projection} FROM {self.table.table}) "
            if where.projection
            else ""
        )
        weights = " + ".join(f"CASE WHEN {self._holds(word)} THEN TO_DOUBLE(?) ELSE 0 END" for word in found)
        length = f'{1 - LENGTH_SHARE} + {LENGTH_SHARE} * LENGTH("VEC_TEXT") / TO_DOUBLE(?)'
        score = f"({weights}) / (1 + {SATURATION} * ({length}))"
        if len(found) > 1:
            score += f" + CASE WHEN {' AND '.join(self._holds(word) for word in found)} THEN TO_DOUBLE(?) ELSE 0 END"
        any_word = " OR ".join(self._holds(word) for word in found)
        condition = f"({any_word}) AND ({where.sql})" if where.sql else any_word
        return (
            f'{head}SELECT TOP {count:d} "ID", "SRC_KEY", "CHUNK_NO", "VEC_TEXT", "VEC_META", '
            f'{score} AS "SCORE" FROM {source} WHERE {condition} ORDER BY "SCORE" DESC'
        )

    def _holds(self, word: Word) -> str:
        if not self.full_text:
            return 'LOWER("VEC_TEXT") LIKE TO_NVARCHAR(?)'
        one = "SCORE(TO_NVARCHAR(?) IN (\"VEC_TEXT\" EXACT SEARCH MODE 'text')) > 0"
        return one if len(word.alternatives) == 1 else f"({' OR '.join([one] * len(word.alternatives))})"


@dataclass(frozen=True, slots=True)
class KeywordQuery:
    """A search text prepared for one table: the words to search and their weights."""

    sql: KeywordSql
    words: tuple[Word, ...]
    weights: tuple[float, ...]
    average: float

    def statement(self, count: int, where: filters.Compiled) -> tuple[str, list[Any]]:
        """Return the statement for the best `count` records with their scores, and its parameters."""
        values: list[Any] = []
        for word, worth in zip(self.words, self.weights, strict=True):
            values += [*self.sql.parameters(word), worth]
        values.append(self.average)
        every = [value for word in self.words for value in self.sql.parameters(word)]
        if len(self.words) > 1:
            values += [*every, sum(self.weights)]  # more than any text's share of them
        return self.sql.search(count, self.words, where), [*values, *every, *where.parameters]


class Keywords:
    """Word searches over the vector tables of one store."""

    def __init__(self, pool: HanaPool) -> None:
        self._pool = pool
        self._full_text: bool | None = None

    def query(self, table: VectorSql, text: str, within: filters.Compiled) -> KeywordQuery | None:
        """Count the texts with each word among the rows that match `within`, because other rows must not affect scores
        or order. Return None when there is nothing to search."""
        if self._full_text is None:
            self._full_text = self._supported(table)
        sql, wanted, doing = KeywordSql(table, self._full_text), words(text), "searching by words"
        texts, average = self._pool.read(sql.lengths(within.sql), within.parameters, doing=doing)[0]
        if not wanted or not texts:
            return None
        counts = [
            self._pool.read(sql.count(word, within.sql), (*sql.parameters(word), *within.parameters), doing=doing)[0][0]
            for word in wanted
        ]
        places = worth_it(wanted, counts, texts)
        weights = (weight(counts[place], texts) for place in places)
        return KeywordQuery(
            sql, tuple(wanted[place] for place in places), tuple(weights), max(float(average or 0), 1.0)
        )

    def _supported(self, table: VectorSql) -> bool:
        """Return whether HANA can search VEC_TEXT by words. Only a search shows it, no system view."""
        probe = Word(("owl",))
        query = KeywordQuery(KeywordSql(table, True), (probe, probe), (1.0, 1.0), 1.0)
        doing = "asking HANA whether it searches texts"
        try:
            self._pool.read(*query.statement(1, filters.Compiled("", ())), doing=doing)
        except StatementFailed:
            return False
        return True

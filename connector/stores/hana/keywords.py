"""Keyword search in HANA: BM25 computed in SQL over VEC_TEXT. Words are found by HANA's text search, or by LIKE if HANA
rejects text search; LIKE also finds parts of words.
"""

from __future__ import annotations

from typing import Any

from connector.hana.connection import HanaPool
from connector.stores import filters
from connector.stores.hana.tables import VectorTable
from connector.stores.words import LENGTH_SHARE, SATURATION, Word, weight, words, worth_it

# This module formats only quoted identifiers and constants into SQL; values are always bound.
# ruff: noqa: S608

Weighed = tuple[list[tuple[Word, float]], float]  # words to search with weights, and the average text length


def _holds(word: Word, full_text: bool) -> tuple[str, list[str]]:
    """Return a condition on one text, and its parameters."""
    if not full_text:
        return 'LOWER("VEC_TEXT") LIKE TO_NVARCHAR(?)', [f"%{word.alternatives[0].lower().replace(' ', '_')}%"]
    one = "SCORE(TO_NVARCHAR(?) IN (\"VEC_TEXT\" EXACT SEARCH MODE 'text')) > 0"
    either = one if len(word.alternatives) == 1 else f"({' OR '.join([one] * len(word.alternatives))})"
    return either, [f'"{phrase}"' for phrase in word.alternatives]  # quoted: HANA reads a phrase, not operators


def probe(table: VectorTable) -> tuple[str, list[Any]]:
    """Return a statement that HANA rejects if it cannot search VEC_TEXT by words, and its parameters."""
    word = Word(("owl",))
    return statement(table, True, ([(word, 1.0)] * 2, 1.0), 1, filters.Compiled())


def weigh(pool: HanaPool, table: VectorTable, text: str, full_text: bool, within: filters.Compiled) -> Weighed | None:
    """Return the words to search and the average text length; None without words or texts to search. Counts only rows
    that match `within`, so that other rows affect neither scores nor order."""
    wanted, doing = words(text), "searching by words"
    where = f" WHERE {within.sql}" if within.sql else ""
    sql = f'SELECT COUNT("VEC_TEXT"), AVG(TO_DOUBLE(LENGTH("VEC_TEXT"))) FROM {table.sql}{where}'
    texts, average = pool.read(sql, within.parameters, doing=doing)[0]
    if not wanted or not texts:
        return None
    counts: list[int] = []
    for word in wanted:
        held, parameters = _holds(word, full_text)
        sql = f"SELECT COUNT(*) FROM {table.sql} WHERE {held}{within.and_also}"
        counts.append(pool.read(sql, (*parameters, *within.parameters), doing=doing)[0][0])
    chosen = [(wanted[place], weight(counts[place], texts)) for place in worth_it(wanted, counts, texts)]
    return chosen, max(float(average or 0), 1.0)


def statement(
    table: VectorTable, full_text: bool, weighed: Weighed, count: int, where: filters.Compiled
) -> tuple[str, list[Any]]:
    """Return the statement for the best `count` records with their scores, and its parameters. `weighed`: as returned
    by `weigh`."""
    weighted, average = weighed
    holds, every, values = [], list[Any](), list[Any]()
    for word, worth in weighted:
        held, parameters = _holds(word, full_text)
        holds.append(held)
        every += parameters
        values += [*parameters, worth]
    values.append(average)
    weights = " + ".join(f"CASE WHEN {held} THEN TO_DOUBLE(?) ELSE 0 END" for held in holds)
    length = f'{1 - LENGTH_SHARE} + {LENGTH_SHARE} * LENGTH("VEC_TEXT") / TO_DOUBLE(?)'
    score = f"({weights}) / (1 + {SATURATION} * ({length}))"
    if len(holds) > 1:  # a text with all words must rank above any text without one of them
        score += f" + CASE WHEN {' AND '.join(holds)} THEN TO_DOUBLE(?) ELSE 0 END"
        values += [*every, sum(worth for _, worth in weighted)]
    any_word = " OR ".join(holds)
    condition = f"({any_word}) AND ({where.sql})" if where.sql else any_word
    sql = table.top(count, f'{score} AS "SCORE"', where, f'WHERE {condition} ORDER BY "SCORE" DESC')
    return sql, [*values, *every, *where.parameters]

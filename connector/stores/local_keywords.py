"""Keyword search of the local store: an FTS5 index over the texts, kept in step by triggers within every transaction
that writes records, and BM25 over it. Search reads within the transaction it is given.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from connector.errors import WordsNotSearchable
from connector.model import Hit
from connector.stores import filters
from connector.stores.local_records import Candidate, Records, best_documents
from connector.stores.snapshot import Mark, read_mark
from connector.stores.sqlite_file import SqliteFile
from connector.stores.words import Word, most_common, words, worth_it

# Contentless: the texts stand in `records`. What is deleted is therefore told again, word for word, by the triggers.
# `scope` holds the collection as a word of its own, so that a search meets no other collection's rows.
_INDEX = (
    "CREATE VIRTUAL TABLE keywords USING fts5(scope, text, content='', tokenize='unicode61 remove_diacritics 2')",
    "CREATE TRIGGER keywords_inserted AFTER INSERT ON records BEGIN "
    "INSERT INTO keywords (rowid, scope, text) VALUES (new.id, 'c' || new.collection, new.text); END",
    "CREATE TRIGGER keywords_deleted AFTER DELETE ON records BEGIN "
    "INSERT INTO keywords (keywords, rowid, scope, text) "
    "VALUES ('delete', old.id, 'c' || old.collection, old.text); END",
    "CREATE TRIGGER keywords_changed AFTER UPDATE OF text, collection ON records BEGIN "
    "INSERT INTO keywords (keywords, rowid, scope, text) "
    "VALUES ('delete', old.id, 'c' || old.collection, old.text); "
    "INSERT INTO keywords (rowid, scope, text) VALUES (new.id, 'c' || new.collection, new.text); END",
)
_FILL = "INSERT INTO keywords (rowid, scope, text) SELECT id, 'c' || collection, text FROM records"
_TRIGGERS = ("keywords_inserted", "keywords_deleted", "keywords_changed")
_OURS = frozenset({"keywords", *_TRIGGERS})

# The weight of `scope` is 0: which collection it is tells nothing about a text.
_SCORED = "SELECT rowid, -bm25(keywords, 0.0, 1.0) FROM keywords WHERE keywords MATCH ?"
_COUNTED = "SELECT count(*) FROM (SELECT 1 FROM keywords WHERE keywords MATCH ? LIMIT ?)"

WORDS_REMEMBERED = 10_000


def prepare(file: SqliteFile, *, read_only: bool = False) -> bool:
    """Make the index where it is missing and fill it from the records, in one transaction; False where this SQLite has
    no FTS5. Then the triggers go, or nothing could be written, and the index is made anew when FTS5 is back. A file
    that is only read stays as it is: False where it has no index."""
    with file.read() as db:
        able, present = _has_fts5(db), _present(db)
    if (present == _OURS) if able else present.isdisjoint(_TRIGGERS):
        return able
    if read_only:
        return False
    with file.write() as db:
        present = _present(db)
        if able and present == _OURS:
            return True  # another process was first
        for name in present & set(_TRIGGERS):
            db.execute(f"DROP TRIGGER {name}")  # nosemgrep: owl-sql-formatted - one of _TRIGGERS
        if able:
            db.execute("DROP TABLE IF EXISTS keywords")
            for statement in (*_INDEX, _FILL):
                db.execute(statement)
    return able


def _has_fts5(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM pragma_module_list WHERE name = 'fts5'").fetchone() is not None


def _present(db: sqlite3.Connection) -> frozenset[str]:
    return frozenset(name for (name,) in db.execute("SELECT name FROM sqlite_master") if name in _OURS)


def unsupported() -> WordsNotSearchable:
    return WordsNotSearchable(
        f"keyword search needs SQLite with FTS5, which this Python's SQLite {sqlite3.sqlite_version} lacks: "
        "use another build of Python, or vector search, which works without"
    )


@dataclass(frozen=True, slots=True)
class _Counts:
    """Of one collection, while `mark` is what a transaction sees: its texts, and up to so many of those with a word."""

    mark: Mark
    texts: int
    holding: dict[Word, int] = field(default_factory=dict)


class WordCounts:
    """How many texts hold a word: as long to count as to search, and the same words come again and again. Remembered
    until something is written. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[int, _Counts] = {}

    def of(self, db: sqlite3.Connection, collection: int) -> _Counts:
        mark, known = read_mark(db), self._known.get(collection)
        if known is None or known.mark != mark or len(known.holding) > WORDS_REMEMBERED:
            sql = "SELECT count(*) FROM records WHERE collection = ?"
            (texts,) = db.execute(sql, (collection,)).fetchone()
            known = self._known[collection] = _Counts(mark, texts)
        return known


class KeywordSearch:
    """Searches one collection within one transaction."""

    def __init__(self, db: sqlite3.Connection, collection: int, counts: WordCounts) -> None:
        self._db = db
        self._counts = counts
        self._scope = f'scope : "c{collection:d}"'
        self._collection = collection
        self._records = Records(db)

    def __call__(self, text: str, k: int, condition: filters.Condition | None) -> list[Hit]:
        """The best `k` documents by BM25, ties by document id. Texts that hold all the words stand before the others:
        the greatest BM25 of all is added to theirs."""
        wanted = self._chosen(words(text))
        if k < 1 or not wanted:
            return []
        found = self._db.execute(_SCORED, (self._match(wanted),)).fetchall()
        ids = np.array([id_ for id_, _ in found], dtype=np.int64)
        scores = np.array([score for _, score in found], dtype=np.float64)
        if len(wanted) > 1:
            scores[np.isin(ids, self._complete(wanted))] += scores.max(initial=0.0)
        order = np.argsort(-scores, kind="stable")
        return self._records.hits(self._walk(ids[order], scores[order], k, condition))

    def _chosen(self, wanted: Sequence[Word]) -> list[Word]:
        if len(wanted) < 2:
            return list(wanted)
        known = self._counts.of(self._db, self._collection)
        limit = most_common(known.texts)
        if limit == known.texts:
            return list(wanted)
        for word in wanted:
            if word not in known.holding:
                (known.holding[word],) = self._db.execute(_COUNTED, (self._match([word]), limit + 1)).fetchone()
        return [wanted[place] for place in worth_it(wanted, [known.holding[word] for word in wanted], known.texts)]

    def _complete(self, wanted: Sequence[Word]) -> NDArray[np.int64]:
        """Ids of the records that hold all the words."""
        rows = self._db.execute("SELECT rowid FROM keywords WHERE keywords MATCH ?", (self._match(wanted, "AND"),))
        return np.array([id_ for (id_,) in rows], dtype=np.int64)

    def _match(self, wanted: Sequence[Word], joined: str = "OR") -> str:
        """FTS5's query. Every word is quoted, and holds letters, digits and blanks only."""
        alternatives = (" OR ".join(f'"{phrase}"' for phrase in word.alternatives) for word in wanted)
        return f"{self._scope} AND text : ({f' {joined} '.join(f'({some})' for some in alternatives)})"

    def _walk(
        self, ids: NDArray[np.int64], scores: NDArray[np.float64], k: int, condition: filters.Condition | None
    ) -> list[Candidate]:
        """Down the ranking, in steps that never part rows of one score, until `k` documents pass the filter."""
        passed: list[Candidate] = []
        start, step = 0, 2 * k + 16
        while start < len(ids):
            end = min(start + step, len(ids))
            end = int(np.searchsorted(-scores, -scores[end - 1], side="right"))
            chunk = dict(zip(ids[start:end].tolist(), scores[start:end].tolist(), strict=True))
            passed = best_documents([*passed, *self._records.candidates(chunk, condition)], k)
            if len(passed) == k:
                break
            start, step = end, step * 4
        return passed

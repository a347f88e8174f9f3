"""The tables of the HANA store and their statements: vector tables in the layout of langchain-hana's HanaDB, and two
state tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from connector.errors import ConfigurationError
from connector.hana.connection import quote
from connector.stores.records import CHECKPOINT_LENGTH, SPREAD_FACTOR, SPREAD_MODULUS

STATE = "OWL_STATE"
QUARANTINE = "OWL_QUARANTINE"
LONGEST_NAME = 100
"""In characters; the table's name adds to it."""

FIND_INDEXES = "SELECT INDEX_NAME, INDEX_TYPE FROM SYS.INDEXES WHERE SCHEMA_NAME = ? AND TABLE_NAME = ?"

_STATE_COLUMNS = """(
"COLLECTION" NVARCHAR(200) PRIMARY KEY, "TABLE_NAME" NVARCHAR(127) NOT NULL, "GENERATION" INTEGER NOT NULL,
"MODEL_ID" NVARCHAR(200) NOT NULL, "FINGERPRINT" NVARCHAR(200) NOT NULL, "DIMENSION" INTEGER NOT NULL,
"META_NAMES" NCLOB, "CHECKPOINT" NVARCHAR({checkpoint}), "LAST_SYNC" TIMESTAMP, "LEASE_OWNER" NVARCHAR(200),
"LEASE_EPOCH" BIGINT DEFAULT 0 NOT NULL, "LEASE_UNTIL" TIMESTAMP, "SPEC" NCLOB, "CREATED_AT" TIMESTAMP,
"RETIRED_AT" TIMESTAMP, "HIGHEST" INTEGER)"""
_QUARANTINE_COLUMNS = """(
"COLLECTION" NVARCHAR(200) NOT NULL, "SRC_KEY" NVARCHAR(2000) NOT NULL, "STAGE" NVARCHAR(100) NOT NULL,
"REASON" NVARCHAR(2000) NOT NULL, "ATTEMPTS" INTEGER NOT NULL, "LAST_SEEN" TIMESTAMP, "ROW_DIGEST" VARBINARY(8),
PRIMARY KEY ("COLLECTION", "SRC_KEY"))"""


LOOKUP_SIZES = (1, 8, 64, 512)
"""Ids per look-up statement. Few sizes give few statement texts in HANA's plan cache."""

Id = TypeVar("Id")


def portions(ids: Sequence[Id]) -> Iterator[list[Id]]:
    """Split ids into lists of LOOKUP_SIZES, repeating the last id to fill the last list."""
    start = 0
    while start < len(ids):
        size = next((n for n in LOOKUP_SIZES if n >= len(ids) - start), LOOKUP_SIZES[-1])
        some = list(ids[start : start + size])
        yield some + [some[-1]] * (size - len(some))
        start += size


def table_name(collection: str, generation: int) -> str:
    """Return OWL_<NAME>_G<n>: upper case, with _ for characters other than A-Z 0-9 _. `HanaStore` rejects names that
    collide."""
    if not 1 <= len(collection) <= LONGEST_NAME:
        raise ConfigurationError(f"a collection's name has 1 to {LONGEST_NAME} characters, this one {len(collection)}")
    return f"OWL_{re.sub('[^A-Z0-9_]', '_', collection.upper())}_G{generation}"


_GENERATION_COLUMNS = (
    '"COLLECTION", "TABLE_NAME", "GENERATION", "MODEL_ID", "FINGERPRINT", "DIMENSION", "CHECKPOINT", "LAST_SYNC", '
    '"LEASE_EPOCH"'
)
_OF_COLLECTION = """"COLLECTION" = ? OR "COLLECTION" LIKE ? ESCAPE '\\'"""

# This module formats only quoted identifiers and constants into SQL; values are always bound.
# ruff: noqa: S608


@dataclass(frozen=True, slots=True)
class StateSql:
    """Statements about the state tables of a schema: collections, leases, generations, quarantine."""

    schema: str

    @property
    def state(self) -> str:
        return f"{quote(self.schema)}.{quote(STATE)}"

    @property
    def quarantine(self) -> str:
        return f"{quote(self.schema)}.{quote(QUARANTINE)}"

    def create(self) -> dict[str, str]:
        """Return the statements by table name."""
        columns = _STATE_COLUMNS.format(checkpoint=CHECKPOINT_LENGTH)
        return {
            STATE: f"CREATE COLUMN TABLE {self.state} {columns}",
            QUARANTINE: f"CREATE COLUMN TABLE {self.quarantine} {_QUARANTINE_COLUMNS}",
        }

    def find(self) -> str:
        return (
            'SELECT "TABLE_NAME", "GENERATION", "MODEL_ID", "FINGERPRINT", "DIMENSION", "META_NAMES", "CHECKPOINT", '
            f'"LAST_SYNC" FROM {self.state} WHERE "COLLECTION" = ?'
        )

    def find_by_table(self) -> str:
        return f'SELECT "COLLECTION" FROM {self.state} WHERE "TABLE_NAME" = ?'

    def insert(self) -> str:
        return (
            f'INSERT INTO {self.state} ("COLLECTION", "TABLE_NAME", "GENERATION", "MODEL_ID", "FINGERPRINT", '
            '"DIMENSION", "META_NAMES", "SPEC", "CREATED_AT") VALUES (?, ?, ?, ?, ?, ?, ?, ?, CURRENT_UTCTIMESTAMP)'
        )

    def change_model(self) -> str:
        return (
            f'UPDATE {self.state} SET "TABLE_NAME" = ?, "GENERATION" = ?, "MODEL_ID" = ?, "FINGERPRINT" = ?, '
            '"DIMENSION" = ?, "CHECKPOINT" = NULL, "LAST_SYNC" = NULL, "LEASE_OWNER" = NULL, "LEASE_UNTIL" = NULL, '
            '"LEASE_EPOCH" = "LEASE_EPOCH" + 1 WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'
        )

    def change_names(self) -> str:
        return f'UPDATE {self.state} SET "META_NAMES" = ? WHERE "COLLECTION" = ?'

    def take_lease(self) -> str:
        return (
            f'UPDATE {self.state} SET "LEASE_OWNER" = ?, "LEASE_EPOCH" = "LEASE_EPOCH" + 1, '
            '"LEASE_UNTIL" = ADD_SECONDS(CURRENT_UTCTIMESTAMP, ?) '
            'WHERE "COLLECTION" = ? AND ("LEASE_UNTIL" IS NULL OR "LEASE_UNTIL" < CURRENT_UTCTIMESTAMP)'
        )

    def read_lease(self) -> str:
        return f'SELECT "LEASE_OWNER", "LEASE_EPOCH" FROM {self.state} WHERE "COLLECTION" = ?'

    def renew_lease(self) -> str:
        """Return the first statement of every write: it also locks the row against a takeover before the commit."""
        return (
            f'UPDATE {self.state} SET "LEASE_UNTIL" = ADD_SECONDS(CURRENT_UTCTIMESTAMP, ?) '
            'WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'
        )

    def release_lease(self) -> str:
        return (
            f'UPDATE {self.state} SET "LEASE_UNTIL" = NULL, "LEASE_OWNER" = NULL, "LEASE_EPOCH" = "LEASE_EPOCH" + 1 '
            'WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'
        )

    def set_checkpoint(self) -> str:
        return (
            f'UPDATE {self.state} SET "CHECKPOINT" = ?, "LAST_SYNC" = CURRENT_UTCTIMESTAMP '
            'WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'
        )

    def set_mark(self) -> str:
        return f'UPDATE {self.state} SET "CHECKPOINT" = ? WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'

    def read_quarantine(self) -> str:
        return (
            f'SELECT "SRC_KEY", "STAGE", "REASON", "ATTEMPTS", "LAST_SEEN", "ROW_DIGEST" FROM {self.quarantine} '
            'WHERE "COLLECTION" = ? ORDER BY "SRC_KEY"'
        )

    def put_quarantine(self) -> str:
        return (
            f'UPSERT {self.quarantine} ("COLLECTION", "SRC_KEY", "STAGE", "REASON", "ATTEMPTS", "ROW_DIGEST", '
            '"LAST_SEEN") VALUES (?, ?, ?, ?, ?, ?, CURRENT_UTCTIMESTAMP) WITH PRIMARY KEY'
        )

    def release_quarantine(self) -> str:
        return f'DELETE FROM {self.quarantine} WHERE "COLLECTION" = ? AND "SRC_KEY" = ?'

    def count_quarantine(self) -> str:
        return f'SELECT COUNT(*) FROM {self.quarantine} WHERE "COLLECTION" = ?'

    def find_all(self) -> str:
        return (
            f'SELECT {_GENERATION_COLUMNS}, "SPEC", "CREATED_AT", "RETIRED_AT", "HIGHEST" FROM {self.state} '
            f'WHERE {_OF_COLLECTION} ORDER BY "GENERATION"'
        )

    def lock_all(self) -> str:
        return f"SELECT {_GENERATION_COLUMNS} FROM {self.state} WHERE {_OF_COLLECTION} FOR UPDATE"

    def revive(self) -> str:
        return f'UPDATE {self.state} SET "RETIRED_AT" = NULL WHERE "COLLECTION" = ?'

    def record_spec(self) -> str:
        return f'UPDATE {self.state} SET "SPEC" = ? WHERE "GENERATION" = ? AND "COLLECTION" IN (?, ?)'

    def rename(self, retired: str) -> str:
        """`retired`: SQL expression for the time."""
        return (
            f'UPDATE {self.state} SET "COLLECTION" = ?, "CHECKPOINT" = ?, "LEASE_EPOCH" = ?, "LEASE_OWNER" = NULL, '
            f'"LEASE_UNTIL" = NULL, "RETIRED_AT" = {retired} WHERE "COLLECTION" = ?'
        )

    def move_quarantine(self) -> str:
        return f'UPDATE {self.quarantine} SET "COLLECTION" = ? WHERE "COLLECTION" = ?'

    def mark_dropped(self) -> str:
        return (
            f'UPDATE {self.state} SET "FINGERPRINT" = ?, "CHECKPOINT" = NULL, "LAST_SYNC" = NULL '
            'WHERE "COLLECTION" = ? AND "LEASE_EPOCH" = ?'
        )

    def keep_highest(self) -> str:
        return f'UPDATE {self.state} SET "HIGHEST" = ? WHERE "COLLECTION" = ?'

    def drop_quarantine(self) -> str:
        return f'DELETE FROM {self.quarantine} WHERE "COLLECTION" = ?'

    def delete(self) -> str:
        return f'DELETE FROM {self.state} WHERE "COLLECTION" = ?'


_FIRST = '("CHUNK_NO" = 0 OR "SRC_KEY" IS NULL)'
"""One record per row: the first chunk of a document, and every foreign record."""


def _and(condition: str) -> str:
    return f" AND ({condition})" if condition else ""


@dataclass(frozen=True, slots=True)
class VectorSql:
    """Statements about one vector table."""

    schema: str
    name: str

    @property
    def table(self) -> str:
        return f"{quote(self.schema)}.{quote(self.name)}"

    @property
    def key_index(self) -> str:
        return f"{self.name}_KEY"

    def create(self, dimension: int) -> str:
        return (
            f'CREATE COLUMN TABLE {self.table} ("ID" BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, '
            f'"VEC_TEXT" NCLOB, "VEC_META" NCLOB, "VEC_VECTOR" REAL_VECTOR({dimension:d}), "SRC_KEY" NVARCHAR(2000), '
            '"CHUNK_NO" INTEGER, "CONTENT_HASH" VARBINARY(32), "MODEL_ID" NVARCHAR(200), "SYNCED_AT" TIMESTAMP)'
        )

    def create_key_index(self) -> str:
        return f'CREATE INDEX {quote(self.schema)}.{quote(self.key_index)} ON {self.table} ("SRC_KEY")'

    def drop(self) -> str:
        return f"DROP TABLE {self.table}"

    def create_hnsw(self) -> str:
        """Return the statement. ONLINE takes only a shared lock while building."""
        return (
            f"CREATE HNSW VECTOR INDEX {quote(self.schema)}.{quote(self.name + '_HNSW')} ON {self.table} "
            '("VEC_VECTOR") SIMILARITY FUNCTION COSINE_SIMILARITY ONLINE'
        )

    def insert(self) -> str:
        return (
            f'INSERT INTO {self.table} ("VEC_TEXT", "VEC_META", "VEC_VECTOR", "SRC_KEY", "CHUNK_NO", "CONTENT_HASH", '
            '"MODEL_ID", "SYNCED_AT") VALUES (?, ?, ?, ?, ?, ?, ?, CURRENT_UTCTIMESTAMP)'
        )

    def delete(self) -> str:
        return f'DELETE FROM {self.table} WHERE "SRC_KEY" = ?'

    def update_metadata(self) -> str:
        return (
            f'UPDATE {self.table} SET "VEC_META" = ?, "CONTENT_HASH" = ?, "SYNCED_AT" = CURRENT_UTCTIMESTAMP '
            'WHERE "SRC_KEY" = ? AND "CHUNK_NO" = ?'
        )

    def stored(self) -> str:
        return (
            f'SELECT "ID", "SRC_KEY", "CHUNK_NO", "CONTENT_HASH" FROM {self.table} '
            'WHERE "SRC_KEY" IS NOT NULL AND "ID" > ? ORDER BY "ID" LIMIT ?'
        )

    def stored_of(self, count: int) -> str:
        return (
            f'SELECT "ID", "SRC_KEY", "CHUNK_NO", "CONTENT_HASH" FROM {self.table} '
            f'WHERE "SRC_KEY" IN ({", ".join("?" * count)})'
        )

    def records(self) -> str:
        return (
            'SELECT "ID", "SRC_KEY", "CHUNK_NO", "CONTENT_HASH", "MODEL_ID", "VEC_TEXT", "VEC_META", "VEC_VECTOR" '
            f'FROM {self.table} WHERE "ID" > ? ORDER BY "ID" LIMIT ?'
        )

    def vectors(self, count: int) -> str:
        return f'SELECT "ID", "VEC_VECTOR" FROM {self.table} WHERE "ID" IN ({", ".join("?" * count)})'

    def texts_of(self, count: int, condition: str = "") -> str:
        """Select by "SRC_KEY". Parameters: the ids, then those of the condition."""
        return self._texts(f'"SRC_KEY" IN ({", ".join("?" * count)})', condition)

    def texts_of_foreign(self, count: int, condition: str = "") -> str:
        """Select by "ID". Parameters as in `texts_of`."""
        return self._texts(f'"ID" IN ({", ".join("?" * count)}) AND "SRC_KEY" IS NULL', condition)

    def keyed(self, count: int, whole: int, condition: str = "", projection: str = "") -> str:
        """Parameters: `whole` patterns of keys that rank first, one pattern that all rows match, then those of the
        condition. `projection` as in `search`."""
        first = " OR ".join(['"SRC_KEY" LIKE ?'] * whole)
        head, source = self.projected(projection)
        return (
            f'{head}SELECT TOP {count:d} "ID", "SRC_KEY", "CHUNK_NO", "VEC_TEXT", "VEC_META", '
            f'CASE WHEN {first} THEN 0 ELSE 1 END AS "PLACE" FROM {source} '
            f'WHERE "SRC_KEY" LIKE ? AND "CHUNK_NO" = 0{_and(condition)} ORDER BY "PLACE", "SRC_KEY"'
        )

    def _texts(self, which: str, condition: str) -> str:
        return (
            f'SELECT "ID", "SRC_KEY", "CHUNK_NO", "VEC_TEXT", "VEC_META" FROM {self.table} '
            f"WHERE {which}{_and(condition)}"
        )

    def count_rows(self, condition: str = "") -> str:
        """Count our documents by their first chunks, and foreign records."""
        return f"SELECT COUNT(*) FROM {self.table} WHERE {_FIRST}{_and(condition)}"

    def sample(self, count: int, condition: str = "", *, texts: bool = True) -> str:
        text = '"VEC_TEXT"' if texts else "''"
        return (
            f'SELECT TOP {count:d} "ID", "SRC_KEY", "CHUNK_NO", {text} AS "VEC_TEXT", "VEC_META" FROM {self.table} '
            f'WHERE {_FIRST}{_and(condition)} ORDER BY MOD(MOD("ID", {SPREAD_MODULUS}) * TO_BIGINT({SPREAD_FACTOR}), '
            f'{SPREAD_MODULUS}), "ID"'
        )

    def count(self) -> str:
        """Count records, our records and our documents."""
        return f'SELECT COUNT(*), COUNT("SRC_KEY"), COUNT(DISTINCT "SRC_KEY") FROM {self.table}'

    def search(self, count: int, condition: str = "", projection: str = "", *, exact: bool = False) -> str:
        """Parameters: the query as text (`records.vector_text`), then those of the condition. `projection` names
        metadata fields for full-text search. `exact`: without an HNSW index.

        SAP documents TOP only with a literal number. TO_REAL_VECTOR takes text everywhere; bound bytes are untested on
        a real HANA.
        """
        head, source = self.projected(projection)
        where = f" WHERE {condition}" if condition else ""
        hint = " WITH HINT (NO_VECTOR_INDEX)" if exact else ""
        return (
            f'{head}SELECT TOP {count:d} "ID", "SRC_KEY", "CHUNK_NO", "VEC_TEXT", "VEC_META", '
            'COSINE_SIMILARITY("VEC_VECTOR", TO_REAL_VECTOR(?)) AS "SCORE" '
            f'FROM {source}{where} ORDER BY "SCORE" DESC{hint}'
        )

    def projected(self, projection: str) -> tuple[str, str]:
        """Return the text before SELECT, and the table to read from."""
        if not projection:
            return "", self.table
        return f"WITH intermediate_result AS (SELECT *, {projection} FROM {self.table}) ", "intermediate_result"

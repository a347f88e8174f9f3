"""The SQL that the stores send, for tests that compare how two things are found out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from app.src.service import collections
from connector.hana.connection import HanaPool, Session
from connector.stores.hana import store as hana_store
from connector.stores.local.sqlite_file import SqliteFile


@contextmanager
def statements() -> Iterator[list[str]]:
    """Those sent to SQLite and to HANA meanwhile, in order and without their parameters. What is known of a collection
    does not grow old, so the same question sends the same ones however long it takes."""
    sent: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hana_store, "REMEMBERED", math.inf)
        patch.setattr(collections, "_STATUS_SECONDS", math.inf)
        read, query, lent = HanaPool.read, Session.query, SqliteFile.read

        def reading(self: HanaPool, sql: str, *args: Any, **more: Any) -> Any:
            sent.append(sql)
            return read(self, sql, *args, **more)

        def querying(self: Session, sql: str, *args: Any, **more: Any) -> Any:
            sent.append(sql)
            return query(self, sql, *args, **more)

        @contextmanager
        def lending(self: SqliteFile) -> Iterator[Any]:
            with lent(self) as db:
                yield Recorded(db, sent)

        patch.setattr(HanaPool, "read", reading)
        patch.setattr(Session, "query", querying)
        patch.setattr(SqliteFile, "read", lending)
        yield sent


class Recorded:
    """A connection that writes down its statements."""

    def __init__(self, db: Any, sent: list[str]) -> None:
        self._db, self._sent = db, sent

    def execute(self, sql: str, *parameters: Any) -> Any:
        self._sent.append(sql)
        return self._db.execute(sql, *parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

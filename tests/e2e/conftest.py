"""The whole path without a surface: the emulator, the real hdbcli, the connector, the hashing embedder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from connector.hana.connection import ConnectionOptions, HanaPool
from connector.hana.source import HanaSource
from connector.stores.hana.store import HanaStore
from connector.sync.run import Ends
from hana_emulator.testing import Emulator

_PASSWORD = "Alchemist-1"


@pytest.fixture(scope="session")
def hashing() -> Iterator[EngineEmbedder]:
    engine = load_engine(EngineOptions(model="hash:64"))
    yield EngineEmbedder(engine)
    engine.close()


@pytest.fixture
def open_pool() -> Iterator[Callable[[Emulator], HanaPool]]:
    pools: list[HanaPool] = []

    def open_(emulator: Emulator, **options: Any) -> HanaPool:
        login = ConnectionOptions(
            host=emulator.host, port=emulator.port, user=emulator.user, password=emulator.password, encrypt=False
        )
        pools.append(HanaPool(login, **options))
        return pools[-1]

    yield open_
    for pool in pools:
        pool.close()


def plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, memoryview) else value


@pytest.fixture
def run_sql(hana: Any) -> Callable[..., Any]:
    """Run a statement in the test's schema and commit; rows, if it gives any."""

    def run(sql: str, *rows: tuple[Any, ...]) -> Any:
        cursor = hana.cursor()
        if len(rows) > 1:
            cursor.executemany(sql, rows)
        else:
            cursor.execute(sql, *rows)
        found = [tuple(map(plain, row)) for row in cursor.fetchall()] if cursor.description else None
        hana.commit()
        return found

    return run


@pytest.fixture
def ends(emulator: Emulator, hana_schema: str, open_pool: Callable[..., HanaPool], hashing: EngineEmbedder) -> Ends:
    """Source and vector store in the same emulator and the same schema."""
    pool = open_pool(emulator)
    return Ends(HanaSource(pool), HanaStore(pool, hana_schema), hashing)


@pytest.fixture
def engine(emulator: Emulator, hana_schema: str) -> Iterator[sa.Engine]:
    """Logged in as a user of its own, whose schema has its name, as the dialect takes for granted."""
    name = f"ALCHEMIST_{hana_schema}"
    admin = emulator.connect(autocommit=True)
    cursor = admin.cursor()
    cursor.execute(f'CREATE USER {name} PASSWORD "{_PASSWORD}" NO FORCE_FIRST_PASSWORD_CHANGE')
    engine = sa.create_engine(sa.URL.create("hana", name, _PASSWORD, emulator.host, emulator.port))
    yield engine
    engine.dispose()
    cursor.execute(f"DROP USER {name} CASCADE")
    admin.close()

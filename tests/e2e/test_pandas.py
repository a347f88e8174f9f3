"""pandas on the emulator: `read_sql` over hdbcli and over sqlalchemy-hana, `DataFrame.to_sql`."""

from __future__ import annotations

import pandas as pd
import pytest
import sqlalchemy

FRAME = pd.DataFrame(
    {
        "id": [1, 2, 3],
        "name": ["pump", "ä😀", None],
        "price": [1.5, None, -3.25],
        "sold": [True, False, True],
        "day": pd.to_datetime(["2024-01-01 00:00:00", "2024-02-29 12:30:15.123456", None], format="mixed"),
    }
)


@pytest.fixture
def stored(engine: sqlalchemy.Engine) -> sqlalchemy.Engine:
    FRAME.to_sql("things", engine, index=False, dtype={"name": sqlalchemy.NVARCHAR(50)})
    return engine


def test_a_frame_written_comes_back_the_same(stored: sqlalchemy.Engine) -> None:
    for found in (pd.read_sql("SELECT * FROM things ORDER BY id", stored), pd.read_sql_table("things", stored)):
        pd.testing.assert_frame_equal(found, FRAME, check_dtype=False)
        assert list(found.dtypes[["id", "price", "sold"]]) == ["int64", "float64", "bool"]
        assert found["day"].dtype.kind == "M"


def test_if_exists(stored: sqlalchemy.Engine) -> None:
    FRAME.to_sql("things", stored, index=False, if_exists="append")
    assert len(pd.read_sql_table("things", stored)) == 6
    FRAME.head(1).to_sql("things", stored, index=False, if_exists="replace")
    assert len(pd.read_sql_table("things", stored)) == 1
    with pytest.raises(ValueError, match="already exists"):
        FRAME.to_sql("things", stored)


def test_parameters_chunks_and_index(stored: sqlalchemy.Engine) -> None:
    query = sqlalchemy.text("SELECT id, name FROM things WHERE id >= :least ORDER BY id")
    found = pd.read_sql(query, stored, params={"least": 2}, index_col="id")
    assert list(found.index) == [2, 3]
    sizes = [len(part) for part in pd.read_sql("SELECT * FROM things ORDER BY id", stored, chunksize=2)]
    assert sizes == [2, 1]


def test_read_sql_over_hdbcli(stored: sqlalchemy.Engine) -> None:
    query = "SELECT ID, NAME, DAY FROM THINGS WHERE ID > ? ORDER BY ID"
    lent = stored.raw_connection()
    connection = lent.driver_connection
    with pytest.warns(UserWarning, match="pandas only supports SQLAlchemy"):
        found = pd.read_sql(query, connection, params=(1,), index_col="ID", parse_dates=["DAY"])
    assert list(found.index) == [2, 3]
    assert list(found.columns) == ["NAME", "DAY"]
    assert found.loc[2, "DAY"] == pd.Timestamp("2024-02-29 12:30:15.123456")
    assert found.loc[2, "NAME"] == "ä😀"
    assert pd.isna(found.loc[3, "NAME"])
    lent.close()


def test_a_broken_query_names_its_error(stored: sqlalchemy.Engine) -> None:
    with pytest.raises(pd.errors.DatabaseError, match="259"):
        pd.read_sql("SELECT * FROM nothing", stored)

"""hana-ml on the emulator: its connection and the basics of its DataFrame. Its algorithms run inside a HANA only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest

from hana_emulator.testing import Emulator

dataframe = pytest.importorskip("hana_ml.dataframe")

FRAME = pd.DataFrame(
    {
        "ID": [1, 2, 3, 4],
        "NAME": ["pump", "motor", "belt", None],
        "PRICE": [1.5, 2.5, None, 4.0],
        "KIND": ["x", "x", "y", "y"],
        "DAY": pd.to_datetime(["2024-01-01", "2024-02-29", "2024-03-01", "2024-12-31"]),
    }
)


@pytest.fixture
def context(emulator: Emulator, hana_schema: str) -> Iterator[Any]:
    opened = dataframe.ConnectionContext(
        emulator.host, emulator.port, emulator.user, emulator.password, encrypt="false", currentSchema=hana_schema
    )
    yield opened
    opened.close()


@pytest.fixture
def things(context: Any) -> Any:
    return dataframe.create_dataframe_from_pandas(
        context, FRAME, "THINGS", primary_key="ID", table_structure={"NAME": "NVARCHAR(20)"}, disable_progressbar=True
    )


def values(frame: Any) -> list[tuple[Any, ...]]:
    """The rows collected, with None for every kind of missing value."""
    return [tuple(None if pd.isna(value) else value for value in row) for row in frame.collect().to_numpy().tolist()]


def test_connection(context: Any, hana_schema: str) -> None:
    assert context.get_current_schema() == hana_schema
    assert int(context.hana_major_version()) == 4
    assert context.has_schema(hana_schema)
    assert values(context.sql("SELECT 1 AS A, 'b' AS B FROM DUMMY")) == [(1, "b")]


def test_tables_come_and_go(context: Any, things: Any) -> None:
    assert context.has_table("THINGS")
    assert not context.has_table("NOTHING")
    assert list(context.get_tables()["TABLE_NAME"]) == ["THINGS"]
    things.filter("ID < 3").save("FEW")
    assert context.table("FEW").count() == 2
    context.drop_table("THINGS")
    assert not context.has_table("THINGS")
    with pytest.raises(Exception, match="259"):
        context.table("THINGS").collect()


def test_what_was_written_comes_back(things: Any) -> None:
    pd.testing.assert_frame_equal(things.sort("ID").collect(), FRAME, check_dtype=False)
    assert things.shape == [4, 5]
    types = {name: kind for name, kind, *_ in things.dtypes()}
    assert types == {
        "ID": "INT",
        "NAME": "NVARCHAR",
        "PRICE": "DOUBLE",
        "KIND": "NVARCHAR",
        "DAY": "TIMESTAMP",
    }


def test_rows_and_columns(things: Any) -> None:
    assert things.columns == ["ID", "NAME", "PRICE", "KIND", "DAY"]
    assert values(things.select("ID", ("PRICE * 2", "DOUBLED")).filter("DOUBLED > 4").sort("ID")) == [
        (2, 5.0),
        (4, 8.0),
    ]
    assert [row[0] for row in values(things.sort("PRICE", desc=True).head(2))] == [4, 2]
    assert things.drop("DAY").rename_columns({"ID": "NUMBER"}).columns == ["NUMBER", "NAME", "PRICE", "KIND"]
    assert sorted(values(things.distinct("KIND"))) == [("x",), ("y",)]
    assert things.cast("ID", "BIGINT").dtypes()[0][1] == "BIGINT"
    assert [row[0] for row in values(things.add_id("N").select("N").sort("N"))] == [1, 2, 3, 4]


def test_missing_values(things: Any) -> None:
    assert things.hasna()
    assert things.dropna().count() == 2
    assert values(things.fillna(0, subset=["PRICE"]).select("ID", "PRICE").filter("ID = 3")) == [(3, 0.0)]


def test_aggregates(things: Any) -> None:
    wanted = [("count", "ID", "N"), ("avg", "PRICE", "MEAN"), ("median", "PRICE", "MID"), ("stddev", "PRICE", "SD")]
    found = values(things.agg(wanted, group_by="KIND").sort("KIND"))
    assert found == [("x", 2, 2.0, 2.0, pytest.approx(0.70710678)), ("y", 2, 4.0, 4.0, None)]
    assert things.corr("ID", "PRICE").collect().iat[0, 0] == pytest.approx(0.9971764649527378)


def test_describe(things: Any) -> None:
    found = things.describe().collect().set_index("column")
    assert found.loc["PRICE", "count"] == 3
    assert found.loc["PRICE", "nulls"] == 1
    assert found.loc["PRICE", "mean"] == pytest.approx(8 / 3)
    assert found.loc["ID", "75_percent_cont"] == pytest.approx(3.25)
    assert found.loc["ID", "50_percent_disc"] == 2
    assert found.loc["NAME", "unique"] == 3


def test_joins_and_unions(context: Any, things: Any) -> None:
    other = things.select("ID", ("UPPER(KIND)", "BIG"))
    joined = things.alias("L").join(other.alias("R"), "L.ID = R.ID", select=[("L.ID", "ID"), ("R.BIG", "BIG")])
    assert values(joined.sort("ID")) == [(1, "X"), (2, "X"), (3, "Y"), (4, "Y")]
    assert things.set_index("ID").join(other.set_index("ID")).count() == 4
    assert things.union(things).count() == 8
    pivot = things.pivot_table(values="PRICE", index="KIND", columns="KIND", aggfunc="sum").collect()
    assert len(pivot) == 2

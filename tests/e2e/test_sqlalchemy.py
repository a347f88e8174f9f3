"""SQLAlchemy with SAP's dialect sqlalchemy-hana on the emulator: DDL, reflection, DML, types, transactions, errors."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy_hana import errors as hana_errors
from sqlalchemy_hana import types as hana_types
from sqlalchemy_hana.elements import upsert
from sqlalchemy_hana.functions import cosine_similarity, to_real_vector

metadata = sa.MetaData()
plants = sa.Table(
    "plants",
    metadata,
    sa.Column("id", sa.Integer, sa.Identity(), primary_key=True),
    sa.Column("name", sa.Unicode(50), nullable=False, comment="as on the sign"),
    sa.Column("town", sa.Unicode(50), server_default="Walldorf"),
    sa.UniqueConstraint("name", name="plants_name"),
    comment="where things are made",
)
parts = sa.Table(
    "Parts",
    metadata,
    sa.Column("number", sa.Unicode(18), primary_key=True),
    sa.Column("plant", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("price", sa.Numeric(10, 2)),
    sa.Column("weight", sa.Double),
    sa.Index("parts_price", "plant", "price"),
)


@pytest.fixture
def filled(engine: sa.Engine) -> sa.Engine:
    metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(plants.insert(), [{"name": "Nord"}, {"name": "Süd", "town": "Rot"}])
        rows = [("P-1", 1, Decimal("9.95"), 1.5), ("P-2", 1, Decimal("100.00"), None), ("P-1", 2, None, 0.25)]
        connection.execute(parts.insert(), [dict(zip(parts.c.keys(), row, strict=True)) for row in rows])
    return engine


def test_reflection(filled: sa.Engine) -> None:
    inspector = sa.inspect(filled)
    assert sorted(inspector.get_table_names()) == ["Parts", "plants"]
    assert inspector.has_table("plants")
    assert not inspector.has_table("parts")
    assert inspector.get_table_comment("plants") == {"text": "where things are made"}
    number, name, town = inspector.get_columns("plants")
    assert (number["name"], number["nullable"], type(number["type"])) == ("id", False, hana_types.INTEGER)
    assert (name["comment"], name["nullable"], name["type"].length) == ("as on the sign", False, 50)
    assert town["default"] == "Walldorf"
    assert inspector.get_pk_constraint("Parts")["constrained_columns"] == ["number", "plant"]
    assert [(key["name"], key["column_names"]) for key in inspector.get_unique_constraints("plants")] == [
        ("plants_name", ["name"])
    ]
    indexes = {index["name"]: (index["column_names"], index["unique"]) for index in inspector.get_indexes("Parts")}
    assert indexes == {"parts_price": (["plant", "price"], False)}
    price = next(column for column in inspector.get_columns("Parts") if column["name"] == "price")["type"]
    assert (type(price), price.precision, price.scale) == (hana_types.DECIMAL, 10, 2)


@pytest.mark.slow
def test_tables_read_back_make_the_same_tables(filled: sa.Engine) -> None:
    found = sa.MetaData()
    found.reflect(filled)
    assert [column.name for column in found.tables["Parts"].primary_key] == ["number", "plant"]
    # HANA shows a text default without its quotes, so it cannot be sent back as it is.
    found.tables["plants"].c.town.server_default = None
    metadata.drop_all(filled)
    assert sa.inspect(filled).get_table_names() == []
    found.create_all(filled)
    assert sorted(sa.inspect(filled).get_table_names()) == ["Parts", "plants"]


def test_views(filled: sa.Engine) -> None:
    with filled.begin() as connection:
        connection.execute(sa.text('CREATE VIEW CHEAP AS SELECT NUMBER AS N FROM "Parts" WHERE PRICE < 50'))
    inspector = sa.inspect(filled)
    assert inspector.get_view_names() == ["cheap"]
    assert "Parts" in inspector.get_view_definition("cheap")
    view = sa.Table("cheap", sa.MetaData(), autoload_with=filled)
    with filled.connect() as connection:
        assert connection.execute(sa.select(view)).all() == [("P-1",)]


def test_queries(filled: sa.Engine) -> None:
    joined = (
        sa.select(plants.c.name, sa.func.count(), sa.func.sum(parts.c.price))
        .join_from(plants, parts, plants.c.id == parts.c.plant, isouter=True)
        .group_by(plants.c.name)
        .order_by(plants.c.name)
    )
    dear = sa.select(parts.c.number, parts.c.price).where(parts.c.price > Decimal("10")).cte("dear")
    ranked = sa.func.row_number().over(partition_by=parts.c.plant, order_by=parts.c.number)
    with filled.connect() as connection:
        assert connection.execute(joined).all() == [("Nord", 2, Decimal("109.95")), ("Süd", 1, None)]
        paged = sa.select(parts.c.number, parts.c.plant).order_by(parts.c.plant, parts.c.number)
        assert connection.execute(paged.limit(1).offset(1)).all() == [("P-2", 1)]
        assert connection.execute(sa.select(dear)).all() == [("P-2", Decimal("100.00"))]
        assert connection.scalars(sa.select(ranked).order_by(parts.c.plant, parts.c.number)).all() == [1, 2, 1]
        south = sa.exists().where(plants.c.name == "Süd", plants.c.id == parts.c.plant)
        assert connection.scalars(sa.select(parts.c.number).where(south)).all() == ["P-1"]
        matching = sa.select(plants.c.name).where(plants.c.name.regexp_match("^s", flags="i"))
        assert connection.scalars(matching).all() == ["Süd"]
        either = sa.union(sa.select(plants.c.name), sa.select(parts.c.number)).order_by("name")
        assert connection.scalars(either).all() == ["Nord", "P-1", "P-2", "Süd"]
        assert connection.scalars(sa.select(plants.c.name).where(plants.c.id.in_([]))).all() == []


def test_changes(filled: sa.Engine) -> None:
    with filled.begin() as connection:
        added = connection.execute(plants.insert().values(name="West"))
        assert added.inserted_primary_key == (3,)
        changed = connection.execute(parts.update().where(parts.c.plant == 1).values(price=parts.c.price * 2))
        assert changed.rowcount == 2
        assert connection.execute(parts.delete().where(parts.c.plant == 2)).rowcount == 1
        values = {"number": "P-2", "plant": 1, "price": Decimal("1"), "weight": 2.0}
        connection.execute(upsert(parts).values(**values).filter_by(number="P-2"))
    with filled.connect() as connection:
        found = connection.execute(sa.select(parts.c.number, parts.c.price).order_by(parts.c.number)).all()
        assert found == [("P-1", Decimal("19.90")), ("P-2", Decimal("1.00"))]
        assert connection.scalar(sa.select(plants.c.town).where(plants.c.name == "West")) == "Walldorf"


TYPES: list[tuple[sa.types.TypeEngine[Any], Any]] = [
    (sa.Integer(), -5),
    (sa.BigInteger(), 2**62),
    (hana_types.TINYINT(), 200),
    (sa.Numeric(20, 6), Decimal("12345678901234.123456")),
    (hana_types.SMALLDECIMAL(), Decimal("1.25")),
    (sa.Double(), 1e300),
    (sa.Boolean(), True),
    (sa.Unicode(20), "ä😀"),
    (sa.Text(), "x" * 10_000),
    (sa.LargeBinary(), b"\0\xff" * 3_000),
    (sa.VARBINARY(10), b"\0\1"),
    (sa.Date(), dt.date(2024, 2, 29)),
    (sa.Date(), dt.date(1, 3, 4)),
    (sa.Time(), dt.time(23, 59, 58)),
    (sa.DateTime(), dt.datetime(2024, 2, 29, 12, 30, 15, 123456)),
    (hana_types.SECONDDATE(), dt.datetime(1582, 10, 4, 12, 30, 15)),
    (hana_types.REAL_VECTOR(3), [1.0, -2.5, 0.0]),
]


OFTEN = (sa.Numeric, sa.DateTime, sa.Unicode, sa.LargeBinary, hana_types.REAL_VECTOR)
FEW_TYPES = [each if isinstance(each[0], OFTEN) else pytest.param(*each, marks=pytest.mark.slow) for each in TYPES]


@pytest.mark.parametrize(("kind", "value"), FEW_TYPES, ids=lambda part: type(part).__name__)
def test_types_keep_their_values(engine: sa.Engine, kind: sa.types.TypeEngine[Any], value: Any) -> None:
    table = sa.Table("typed", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("a", kind))
    table.create(engine)
    with engine.begin() as connection:
        connection.execute(table.insert(), [{"id": 1, "a": value}, {"id": 2, "a": None}])
        found = connection.scalars(sa.select(table.c.a).order_by(table.c.id)).all()
    first = bytes(found[0]) if isinstance(value, bytes) else found[0]
    assert [first, found[1]] == [value, None]
    assert type(first) is type(value)


@pytest.mark.parametrize(
    "year",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(99, marks=pytest.mark.slow),
        1582,
        pytest.param(1583, marks=pytest.mark.slow),
        pytest.param(2024, marks=pytest.mark.slow),
    ],
)
def test_literal_and_bound_dates_agree(engine: sa.Engine, year: int) -> None:
    day = dt.date(year, 3, 4)
    literal = sa.literal_column(f"TO_DATE('{day.isoformat()}')", sa.Date)
    with engine.connect() as connection:
        assert connection.scalar(sa.select(literal)) == day


def test_vector_search(engine: sa.Engine) -> None:
    table = sa.Table(
        "docs", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("v", hana_types.REAL_VECTOR(2))
    )
    table.create(engine)
    score = cosine_similarity(table.c.v, to_real_vector("[1,0]")).label("score")
    with engine.begin() as connection:
        for number, vector in enumerate(("[1,0]", "[0,1]", "[1,1]"), 1):
            connection.execute(table.insert().values(id=number, v=to_real_vector(vector)))
        found = connection.execute(sa.select(table.c.id, score).order_by(score.desc()).limit(2)).all()
    assert found == [(1, pytest.approx(1.0)), (3, pytest.approx(2**-0.5))]


def test_transactions(filled: sa.Engine) -> None:
    count = sa.select(sa.func.count()).select_from(plants)
    with filled.connect() as connection:
        connection.execute(plants.insert().values(name="lost"))
        connection.rollback()
        with connection.begin_nested() as savepoint:
            connection.execute(plants.insert().values(name="lost too"))
            savepoint.rollback()
        connection.execute(plants.insert().values(name="kept"))
        connection.commit()
        assert connection.scalar(count) == 3
        assert connection.get_isolation_level() == "READ COMMITTED"


@pytest.mark.slow
def test_isolation_levels(filled: sa.Engine) -> None:
    count = sa.select(sa.func.count()).select_from(plants)
    with filled.connect() as connection, filled.connect() as other:
        connection = connection.execution_options(isolation_level="REPEATABLE READ")
        assert connection.get_isolation_level() == "REPEATABLE READ"
        before = connection.scalar(count)
        other.execute(plants.insert().values(name="meanwhile"))
        other.commit()
        assert connection.scalar(count) == before
        connection.commit()
        assert connection.scalar(count) == before + 1


class Base(DeclarativeBase):
    pass


class Note(Base):
    __tablename__ = "notes"
    id: Mapped[int] = mapped_column(sa.Identity(), primary_key=True)
    text: Mapped[str] = mapped_column(sa.Text)


def test_mapped_classes(engine: sa.Engine) -> None:
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([Note(text="one"), Note(text="two")])
        session.commit()
        two = session.scalars(sa.select(Note).where(Note.text.like("tw%"))).one()
        two.text = "2"
        session.flush()
        session.delete(session.get_one(Note, 1))
        session.commit()
        assert [(note.id, note.text) for note in session.scalars(sa.select(Note))] == [(2, "2")]


def test_errors_by_their_code(filled: sa.Engine) -> None:
    with filled.connect() as connection:
        with pytest.raises(sa.exc.IntegrityError) as duplicate:
            connection.execute(parts.insert().values(number="P-1", plant=1))
        assert duplicate.value.orig.errorcode == 301
        with pytest.raises(sa.exc.ProgrammingError) as unknown:
            connection.execute(sa.text("SELECT * FROM NOTHING"))
        assert unknown.value.orig.errorcode == 259
    with pytest.raises(sa.exc.NoSuchTableError):
        sa.inspect(filled).get_columns("nothing")
    nowhere = sa.create_engine(filled.url.set(port=1))
    with pytest.raises(sa.exc.DBAPIError) as refused:
        nowhere.connect()
    assert isinstance(hana_errors.convert_dbapi_error(refused.value), hana_errors.ClientConnectionError)

"""The digest of a row as read: equal rows alike, others not, and whatever decides how they are rendered counts."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, datetime, time
from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from connector.document.document import Renderer
from connector.model import Cells, ChunkSpec, CollectionSpec, Column, Row, Table, TableRef

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.integers(0, 1),
    st.text(max_size=8),
    st.sampled_from(["1", "1.5", "null", "2024-01-31", "Decimal", '["Decimal","1.5"]', "a\ud800", "\ud83d\ude00"]),
    st.decimals(allow_nan=False, allow_infinity=False, places=2),
    st.dates(),
    st.times(),
    st.datetimes(),
    st.binary(max_size=8),
)
PAIRS = st.tuples(VALUES, VALUES)


class NoModel:
    dimension, model, fingerprint, max_tokens = 8, "none", "none", 100
    database_model = None


def table(**column):
    columns = (Column("K", "INTEGER"), Column("A", "NVARCHAR", 10), Column("B", "NVARCHAR", 10))
    return Table(
        TableRef("S", "T"), tuple(replace(one, **column) if one.name == "A" else one for one in columns), ("K",)
    )


SPEC = CollectionSpec("c", TableRef("S", "T"), "{A}", metadata=("B",))


def renderer(made=None, **changes):
    return Renderer(replace(SPEC, **changes), made or table(), NoModel())


def row(a, b, token=None):
    return Row((1,), {"K": 1, "A": a, "B": b}, token)


def typed(values):
    """What the database tells apart; the scale of a decimal and its sign at zero too, because texts may show them."""
    return [(type(value), str(value) if isinstance(value, Decimal) else value) for value in values]


@pytest.mark.parametrize("kind", ["NVARCHAR", "DOUBLE"])
@given(one=PAIRS, other=PAIRS)
@example(one=("1", None), other=(1, None))
@example(one=(True, None), other=(1, None))
@example(one=(None, ""), other=("", None))
@example(one=(date(2024, 1, 31), None), other=("2024-01-31", None))
@example(one=(datetime(2024, 1, 31), None), other=(date(2024, 1, 31), None))
@example(one=(time(1), b""), other=(time(1), None))
@example(one=(2**64, None), other=(-(2**64), None))
@example(one=(Decimal("1.5"), None), other=('["Decimal","1.5"]', None))
def test_rows_share_a_digest_only_when_they_are_equal(kind, one, other):
    digest = renderer(table(type_name=kind)).row_digest
    assert (digest(row(*one)) == digest(row(*other))) == (typed(one) == typed(other))


def test_a_number_that_is_none_is_not_null():
    digest = renderer(table(type_name="DOUBLE")).row_digest
    assert len({digest(row(value, "b")) for value in (None, float("nan"), float("inf"), 0.0, -0.0)}) == 5


@given(st.lists(PAIRS, max_size=5), st.lists(st.binary(max_size=4), max_size=5))
def test_many_at_once_are_as_one_by_one(pairs, tokens):
    made = renderer()
    rows = [*(row(*pair) for pair in pairs), *(row("a", "b", token) for token in tokens)]
    assert made.row_digests(rows) == [made.row_digest(one) for one in rows]


@given(PAIRS)
def test_it_does_not_matter_how_the_values_are_held(pair):
    cells = Cells({"K": 0, "A": 1, "B": 2}, (1, *pair))
    assert renderer().row_digest(Row((1,), cells)) == renderer().row_digest(row(*pair))


def test_a_token_stands_for_the_values():
    digest = renderer().row_digest
    assert digest(row("a", "b", b"t")) == digest(row("other", "values", b"t"))
    assert len({digest(row("a", "b")), digest(row("a", "b", b"t")), digest(row("a", "b", b"u"))}) == 3


@pytest.mark.parametrize(
    "changes",
    [{"template": "{A}!"}, {"metadata": ()}, {"chunk": ChunkSpec(max_tokens=5)}, {"metadata": ("B", "A")}],
)
def test_what_decides_how_a_row_is_rendered_counts(changes):
    assert renderer().row_digest(row("a", "b")) != renderer(**changes).row_digest(row("a", "b"))


@pytest.mark.parametrize(
    "column", [{"length": 18}, {"type_name": "NCHAR"}, {"comment": "Number of items"}, {"scale": 2}]
)
def test_a_column_described_otherwise_may_be_shown_otherwise(column):
    """Zeros in front, for one: ten digits are cut in NVARCHAR(10) and stay in NVARCHAR(18)."""
    made = renderer(table(**column))
    assert renderer().row_digest(row("0000000012", "b")) != made.row_digest(row("0000000012", "b"))


def test_cells_are_a_mapping_that_shows_no_value():
    cells = Cells({"A": 0, "B": 1}, ("secret", None))
    assert cells == {"A": "secret", "B": None}
    assert (list(cells), len(cells), cells["A"], cells.get("C")) == (["A", "B"], 2, "secret", None)
    assert "secret" not in repr(cells)

"""From claims to the rows that may be seen: whatever is not plainly a right is none."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.src.access.principal import LOOPBACK, OPERATOR, Principal
from app.src.access.rows import MOST_VALUES, Nothing, Rights, RowsRefused, visible
from app.src.settings import CollectionSettings
from connector.stores.filters import narrowed
from tests.filter_oracle import matches

RIGHTS = {"MANDT": ("mandt",)}
NAMES = {"MANDT": "MANDT", "/BIC/ORG": "BIC_ORG"}


def asking(*, every_row: bool = False, **claims: Any) -> Principal:
    return Principal("somebody", frozenset(("search",)), claims, every_row)


def test_a_claim_becomes_a_filter() -> None:
    assert visible(RIGHTS, NAMES, asking(mandt="100")) == {"MANDT": {"$in": ["100"]}}
    assert visible(RIGHTS, NAMES, asking(mandt=["100", "200", "100"])) == {"MANDT": {"$in": ["100", "200"]}}
    assert visible(RIGHTS, NAMES, asking(mandt=100)) == {"MANDT": {"$in": ["100"]}}


def test_all_rights_must_hold_and_mapped_names_are_the_metadata_s() -> None:
    rights = {"MANDT": ("mandt",), "/BIC/ORG": ("xs.user.attributes", "org")}
    claims: dict[str, Any] = {"mandt": "100", "xs.user.attributes": {"org": ["A", "B"]}}
    assert visible(rights, NAMES, asking(**claims)) == {"MANDT": {"$in": ["100"]}, "BIC_ORG": {"$in": ["A", "B"]}}
    assert isinstance(visible(rights, NAMES, asking(mandt="100")), Nothing), "one of two is none"


def test_who_may_see_every_row_and_collections_without_rights() -> None:
    assert visible(RIGHTS, NAMES, OPERATOR) is None
    assert visible(RIGHTS, NAMES, asking(every_row=True)) is None
    assert visible({}, NAMES, asking()) is None
    assert isinstance(visible(RIGHTS, NAMES, LOOPBACK), Nothing)


WRONG = [
    {},
    {"mandt": None},
    {"mandt": ""},
    {"mandt": "  "},
    {"mandt": []},
    {"mandt": [[]]},
    {"mandt": ["100", None]},
    {"mandt": ["100", ""]},
    {"mandt": ["100", ["200"]]},
    {"mandt": True},
    {"mandt": [True]},
    {"mandt": {"$ne": "x"}},
    {"mandt": [{"$ne": "x"}]},
    {"mandt": {"type": "date", "date": "2024-01-01"}},
    {"mandt": 1.5},
    {"mandt": 100.0},
    {"mandt": math.nan},
    {"mandt": math.inf},
    {"mandt": 10**400},
    {"mandt": b"100"},
    {"mandt": {"100"}},
    {"mandt": "1\0"},
    {"mandt": "\ud800"},
    {"mandt": "x" * 5001},
    {"mandt": [str(number) for number in range(MOST_VALUES + 1)]},
    {"MANDT": "100"},
    {"mandt ": "100"},
]


@pytest.mark.parametrize("claims", WRONG, ids=lambda claims: str(claims)[:40])
def test_whatever_is_no_value_leaves_nothing_to_be_seen(claims: dict[str, Any]) -> None:
    found = visible(RIGHTS, NAMES, asking(**claims))
    assert isinstance(found, Nothing)
    assert "mandt" in found.why
    assert "100" not in found.why.replace("more than 200", ""), "values of claims are not repeated"


def test_the_values_of_all_claims_together_are_bounded() -> None:
    rights = {"MANDT": ("mandt",), "/BIC/ORG": ("org",)}
    half = [str(number) for number in range(MOST_VALUES // 2)]
    assert isinstance(visible(rights, NAMES, asking(mandt=half, org=half)), dict)
    assert isinstance(visible(rights, NAMES, asking(mandt=half, org=[*half, "one more"])), Nothing)


@pytest.mark.parametrize("path", [("a", "b"), ("a", "b", "c"), ("mandt", "x"), ("mandt", "0")])
def test_a_claim_that_does_not_lie_there(path: tuple[str, ...]) -> None:
    assert isinstance(visible({"MANDT": path}, NAMES, asking(mandt="100", a={"x": "100"})), Nothing)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(claim=json_values, held=json_values)
def test_a_row_is_seen_only_if_its_value_is_claimed(claim: Any, held: Any) -> None:
    """Whatever a token and a row hold: text is compared with text, whole, and nothing is a pattern."""
    within = visible(RIGHTS, NAMES, asking(mandt=claim))
    if isinstance(within, Nothing):
        return
    assert within is not None
    condition = narrowed(None, within)
    assert condition is not None
    claimed = {str(value) for value in (claim if isinstance(claim, list) else [claim])}
    if matches(condition, {"MANDT": held}):
        assert not isinstance(held, list | dict | None.__class__)
        assert (str(held).lower() if isinstance(held, bool) else str(held)) in claimed


def test_requests_that_show_rows_of_all_owners_need_every_row() -> None:
    free = {"name": "free", "source": "S.T", "template": "{X}"}
    bound = free | {"name": "orders", "metadata": ["MANDT"], "row_rights": RIGHTS}
    collections = {each["name"]: CollectionSettings.model_validate(each) for each in (free, bound)}
    rights = Rights(collections.values, collections.__getitem__)
    rights.check_every_row(LOOPBACK, "free")
    rights.check_every_row(OPERATOR, "orders")
    for name in ("orders", None):
        with pytest.raises(RowsRefused, match='"orders" has row rights'):
            rights.check_every_row(asking(mandt="100"), name)

"""What every store keeps the same way."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.errors import RowRejected
from connector.stores.records import metadata_of, metadata_text

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**80), 2**80), TEXT, st.floats(allow_nan=False, allow_infinity=False)
)


@given(st.dictionaries(TEXT, SCALARS, max_size=4))
def test_metadata_read_as_they_were_written_and_always_stand_the_same_way(metadata):
    text = metadata_text(metadata)
    assert metadata_of(text) == metadata
    assert text == json.dumps(metadata, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"x", "\ud800", object()])
def test_what_json_has_no_form_for_is_refused(value):
    with pytest.raises(RowRejected):
        metadata_text({"A": "x", "B": value})

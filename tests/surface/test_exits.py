"""The table from error class to exit code."""

from __future__ import annotations

import pytest

from app.src.cli.exits import exit_code, message
from app.src.core import backends
from app.src.settings import SettingsError
from connector import errors


def classes(root: type[BaseException]) -> list[type[BaseException]]:
    return [root, *(inner for kind in root.__subclasses__() for inner in classes(kind))]


@pytest.mark.parametrize("kind", classes(errors.ConfigurationError))
def test_what_the_operator_wrote_is_2(kind: type[Exception]) -> None:
    error = kind.__new__(kind)  # whatever else its constructor wants
    assert exit_code(error) == 2


@pytest.mark.parametrize("kind", [*classes(errors.DatabaseError), errors.StoreCorrupt, errors.LeaseLost])
def test_hana_or_store_unavailable_is_3(kind: type[Exception]) -> None:
    assert exit_code(kind("x")) == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsError("x"), 2),
        (backends.ModelNotFound("x"), 2),
        (backends.WeightsMismatch("x"), 2),
        (backends.DeviceUnavailable("x"), 2),
        (backends.ModelUnsupported("x"), 2),
        (backends.NonFinite([1]), 1),
        (backends.OutOfMemory("x"), 4),
        (errors.SyncPaused("x", reason="r"), 1),
        (errors.RowRejected("x"), 1),
        (KeyError("x"), 4),
    ],
)
def test_the_others(error: Exception, code: int) -> None:
    assert exit_code(error) == code


def test_the_text_of_an_unexpected_error_is_not_told() -> None:
    assert "row text" not in message(KeyError("row text"))
    assert "KeyError" in message(KeyError("row text"))
    assert message(backends.OutOfMemory("the card is full")) == "the card is full"
    assert message(errors.UnknownTable("no table X")) == "no table X"

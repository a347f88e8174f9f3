"""`owl-sap explain`, and the codes that errors carry on the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from app.src.jobs.journal import JobRunning
from app.src.service.explaining import by_code, code_of, explained
from connector import errors

Cli = Callable[..., Any]


def test_a_code_is_explained(cli: Cli) -> None:
    run = cli("--output", "table", "explain", "OWL-2006")
    assert run.code == 0
    assert run.out.startswith("OWL-2006: HANA rejected the login\n")
    assert "What to do:" in run.out
    assert json.loads(cli("explain", "2006", "--json").out)["error"] == "LoginRefused"
    assert json.loads(cli("explain", "owl2006").out)["code"] == "OWL-2006", "off a terminal JSON lines"


def test_without_a_code_all_are_listed(here: Cli) -> None:
    assert {each["code"] for each in json.loads(here("explain", "--json").out)} == {
        each.code for each in explained().values()
    }
    assert "HANA rejected the login" in here("--output", "table", "explain").out


@pytest.mark.parametrize("code", ["OWL-2099", "", "OWL-", "\x1b[2J"])
def test_a_code_that_is_none(here: Cli, code: str) -> None:
    run = here("explain", code)
    assert (run.code, run.out) == (2, "")
    assert run.err.rstrip().endswith("[OWL-1001]")
    assert "\x1b" not in run.err


def test_an_error_ends_with_its_code(here: Cli) -> None:
    run = here("sync", "nope")
    assert run.err.rstrip().endswith("[OWL-1011]")
    assert by_code("OWL-1011").error == "UnknownCollection"


def test_a_class_without_an_entry_has_that_of_the_one_above() -> None:
    one = errors.RowRejected("too long")
    assert code_of(errors.RowsRejected("too long", rows={0: one})) == code_of(one) == "OWL-3001"
    assert code_of(JobRunning("materials", "1")) == "OWL-6001"


def test_what_is_not_ours_is_unexpected() -> None:
    class LoginRefused(Exception):
        """Somebody else's, of the same name."""

    for error in (LoginRefused(), ValueError("row text"), KeyboardInterrupt()):
        assert code_of(error) == "OWL-9000"


def test_the_nearest_codes_are_named() -> None:
    with pytest.raises(LookupError, match="OWL-2012"):
        by_code("OWL-2112")

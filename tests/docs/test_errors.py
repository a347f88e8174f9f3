"""docs/errors.md: every error of ours with its exit code, HTTP status and what to do, and every code of HANA that is
told apart; written from the classes and the tables that decide. After a change of the code write it anew:
OWL_WRITE_DOCS=1 ./scripts/test tests/docs/test_errors.py
"""

from __future__ import annotations

import re
from http import HTTPStatus

import pytest

from app.src.api import errors as http_errors
from app.src.cli import exits
from app.src.core import backends
from app.src.core.finetune import recipe
from app.src.core.onnx_export import optimizer, serving
from app.src.service.explaining import Explained, explained
from app.src.settings import SettingsError
from connector import errors
from tests.docs.sections import ROOT, check_section

WITHOUT_A_PAGE = ("RowsRejected", "Unreachable")
ALSO_LOADED = (optimizer, recipe, serving)
"""Nothing else that is imported here imports them, and their errors count."""
UNLESS_MEANT = "Exception"
"""What stands for everything unexpected."""


def errors_table() -> str:
    kinds = {kind.__name__: kind for kind in _classes()}
    lines = ["| code | error | exit | HTTP | retried |", "|---|---|---|---|---|"]
    for each in _by_code():
        kind = kinds.get(each.error)
        figures = (_exit(kind), _status(kind), _again(kind)) if kind else _of_no_class(each.error)
        cells = (f"[{each.code}](#{each.code.lower()})", each.title, *figures)
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(lines)


def _by_code() -> list[Explained]:
    return sorted(explained().values(), key=lambda each: each.code)


def _of_no_class(name: str) -> tuple[int | str, int | str, str]:
    if name == UNLESS_MEANT:
        return exits.UNEXPECTED, 500, ""
    return "", http_errors.KINDS[name], ""


def explanations() -> str:
    """One heading for each code, so that `docs/errors.md#owl-1001` is its address."""
    parts = []
    for each in _by_code():
        parts += [f"### {each.code}", f"**{each.title}.** {each.what}"]
        if each.causes:
            parts.append("\n".join(("Usual causes:", *(f"- {line}" for line in each.causes))))
        if each.do:
            parts.append("\n".join(("What to do:", *(f"- {line}" for line in each.do))))
        if each.see:
            parts.append("More: " + ", ".join(f"[{place}]({place})" for place in each.see))
    return "\n\n".join(parts)


def codes_table() -> str:
    lines = ["| code | and the text has | error | what it means | what to do |", "|---|---|---|---|---|"]
    for rule in errors.rules():
        codes = ", ".join(map(str, rule.get("codes", ()))) or "any"
        texts = ", ".join(f'"{text}"' for text in rule.get("texts", ()))
        cells = (codes, texts, f"`{rule['error']}`", rule["meaning"], rule.get("next_step", ""))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def statuses_table() -> str:
    told: dict[int, list[str]] = {}
    for name, status in http_errors.KINDS.items():
        told.setdefault(status, []).append(f"`{name}`")
    for kind, status in http_errors.STATUS.items():
        told.setdefault(status, []).append(f"`{kind.__name__}`")
    lines = ["| status | | from |", "|---|---|---|"]
    for status in sorted(told):
        phrase = "the client has left" if status == http_errors.CLIENT_LEFT else HTTPStatus(status).phrase
        lines.append(f"| {status} | {phrase} | {', '.join(told[status])} |")
    return "\n".join(lines)


def _classes() -> list[type[Exception]]:
    """Both trees, then what else the tables of exit codes and statuses name."""
    found: list[type[Exception]] = []

    def place(kind: type[Exception]) -> tuple[str, str]:
        return kind.__module__, kind.__qualname__

    def walk(kind: type[Exception]) -> None:
        # By name: a test that imports a module anew makes its classes twice, and the order is that of the imports.
        known = {place(each) for each in found}
        if place(kind) not in known and kind.__module__.split(".")[0] in ("app", "connector"):
            found.append(kind)
        for lower in sorted(kind.__subclasses__(), key=place):
            walk(lower)

    for root in (errors.ConnectorError, backends.EngineError):
        walk(root)
    tables: list[type[Exception]] = [exits.UsageFault, SettingsError, *http_errors.STATUS]
    for kind in tables:
        walk(kind)
    return [kind for kind in found if not kind.__module__.startswith("app.src.benchmark")]


def _exit(kind: type[Exception]) -> int | str:
    return exits.exit_code(kind.__new__(kind))


def _status(kind: type[Exception]) -> int:
    return next((http_errors.STATUS[each] for each in kind.__mro__ if each in http_errors.STATUS), 500)


def _again(kind: type[Exception]) -> str:
    return "yes" if getattr(kind, "retryable", False) else ""


TABLES = {"errors": errors_table, "hana codes": codes_table, "statuses": statuses_table, "explanations": explanations}


@pytest.mark.parametrize("name", TABLES)
def test_the_page_is_what_the_code_does(name: str) -> None:
    wanted = TABLES[name]()
    assert len(wanted.splitlines()) > 10
    check_section("docs/errors.md", name, wanted, "tests/docs/test_errors.py")


def test_the_pages_that_explanations_name_exist() -> None:
    places = {place.split("#")[0] for each in explained().values() for place in each.see}
    assert [place for place in places if not (ROOT / "docs" / place).is_file()] == []


def test_every_error_has_a_code_of_its_own_or_of_one_above_it() -> None:
    """What only the general page explains is named here, so that nobody adds to it unawares."""
    own = [kind.__name__ for kind in _classes() if kind.__name__ not in explained()]
    assert sorted(own) == sorted(WITHOUT_A_PAGE)


def test_no_code_is_given_twice() -> None:
    codes = [each.code for each in explained().values()]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"OWL-[1-69]\d{3}", code) for code in codes)


def test_every_entry_is_of_an_error_there_is() -> None:
    named = {kind.__name__ for kind in _classes()} | set(http_errors.KINDS) | {UNLESS_MEANT}
    assert set(explained()) - named == set()

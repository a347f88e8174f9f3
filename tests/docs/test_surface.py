"""docs/surface.md: which test uses which verb and route through the real interface. Read from the markers `covers`,
without importing the tests. Each verb and route has one test of its work and one of its errors.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from app.src.api.server import create_app
from app.src.cli import app
from app.src.service.service import Service
from app.src.settings import Settings
from tests.docs.sections import ROOT, check_section

pytestmark = pytest.mark.not_fast  # it reads all tests
PAGE = "docs/surface.md"
NO_ERRORS = {"config schema": "prints what is compiled in and reads nothing that could fail"}
"""What has no errors of its own, and why."""
LATER = (
    *("introspect", "plan", "worker", "generations", "init", "changes install", "evaluate", "finetune"),
    *(
        "keys create",
        "keys list",
        "keys revoke",
        "keys rotate",
        "quarantine list",
        "quarantine show",
        "quarantine retry",
        "quarantine drop",
    ),
    *("GET /", "GET /v1/tables", "GET /v1/tables/{schema}/{table}", "POST /v1/collections/{name}/verify"),
    *("GET /v1/collections/{name}/quarantine", "POST /v1/collections/{name}/quarantine/retry"),
    *("GET /v1/collections/{name}/generations", "POST /v1/collections/{name}/generations"),
    *("GET /v1/jobs/{job_id}/events", "POST /v1/jobs/{job_id}/cancel"),
)
"""Planned for some version; what is there already is left out."""


# -------------------------------------------------------------------------------------------------- what there is


@cache
def verbs() -> tuple[str, ...]:
    return tuple(_verbs(get_command(app)))


def _verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Leaves of the command tree; a group that does something by itself is one too."""
    if not hasattr(command, "commands"):
        yield " ".join(path)
        return
    if path and getattr(command, "invoke_without_command", False):
        yield " ".join(path)
    for name, inner in command.commands.items():
        yield from _verbs(inner, (*path, name))


@cache
def routes() -> tuple[str, ...]:
    service = Service(Settings.model_validate({"embedding": {"model": "hash:8"}}))
    try:
        paths = create_app(service).openapi()["paths"]
    finally:
        service.close()
    described = (f"{method.upper()} {path}" for path, methods in paths.items() for method in methods)
    return (*described, "GET /")  # the console, which is no operation of the API


@dataclass(frozen=True, slots=True)
class Covering:
    """A test and what it says it uses."""

    file: str
    test: str
    names: tuple[str, ...]
    errors: bool


@cache
def covering() -> tuple[Covering, ...]:
    found: list[Covering] = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += _in_module(tree, path)
    return tuple(found)


def _in_module(tree: ast.Module, path: Path) -> Iterator[Covering]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            for mark in filter(_is_covers, node.decorator_list):
                assert isinstance(mark, ast.Call)
                names = tuple(ast.literal_eval(argument) for argument in mark.args)
                errors = any(word.arg == "errors" and ast.literal_eval(word.value) for word in mark.keywords)
                yield Covering(str(path.relative_to(ROOT)), node.name, names, errors)


def _is_covers(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.covers"


def using(name: str, *, errors: bool) -> list[Covering]:
    return [each for each in covering() if name in each.names and each.errors is errors]


# ----------------------------------------------------------------------------------------------------------- the page


def table(head: str, names: Iterable[str]) -> str:
    lines = [f"| {head} | works | refuses |", "|---|---|---|"]
    for name in names:
        refused = _cell(using(name, errors=True)) or NO_ERRORS.get(name, "")
        lines.append(f"| `{name}` | {_cell(using(name, errors=False))} | {refused} |")
    return "\n".join(lines)


def _cell(tests: Sequence[Covering]) -> str:
    by_file: dict[str, list[str]] = {}
    for each in tests:
        by_file.setdefault(each.file.removeprefix("tests/"), []).append(f"`{each.test}`")
    return "; ".join(f"{file}: {', '.join(dict.fromkeys(names))}" for file, names in sorted(by_file.items()))


def later() -> str:
    absent = [name for name in LATER if name not in (*verbs(), *routes())]
    if not absent:
        return "Nothing that is planned is missing."
    return f"These come with a later version: {', '.join(f'`{name}`' for name in absent)}."


@pytest.mark.parametrize("section", ["verbs", "routes", "later"])
def test_the_page_is_what_the_tests_say(section: str) -> None:
    texts = {"verbs": table("verb", verbs()), "routes": table("route", routes()), "later": later()}
    check_section(PAGE, section, texts[section], "tests/docs/test_surface.py")


# ------------------------------------------------------------------------------------------------------ nothing missing


@pytest.mark.parametrize("name", [*verbs(), *routes()])
def test_everything_is_used_by_a_test_and_so_are_its_errors(name: str) -> None:
    assert using(name, errors=False), f"no test marked covers({name!r}) uses it"
    assert using(name, errors=True) or name in NO_ERRORS, f"no test marked covers({name!r}, errors=True)"


def test_markers_name_only_what_there_is() -> None:
    named = {name for each in covering() for name in each.names} | set(NO_ERRORS)
    assert named - {*verbs(), *routes()} == set()


def test_markers_are_literals_on_functions() -> None:
    """Anything else would be overlooked above."""
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in (ROOT / "tests").rglob("test_*.py")
        if path.name != "test_surface.py"
    }
    written = sum(text.count("mark.covers(") for text in texts.values())
    assert written == len(covering())

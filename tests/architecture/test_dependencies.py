"""Every package that shipped code imports is declared in pyproject.toml, not only brought along by another package."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
OWN = {"app", "connector", "hana_emulator", "owl_sap_client"}
# These run in environments of their own (scripts/peers) and import each other by name.
ELSEWHERE = ROOT / "app" / "src" / "benchmark" / "workers"
# The extras that a package's users install; none is for developers only.
EXTRAS = {
    "app": {"hana", "engine", "serve", "onnx", "tensorrt", "train", "langchain", "mcp", "benchmark"},
    "connector": {"hana", "langchain"},
    "hana_emulator": set(),
    "owl_sap_client": {"langchain"},
}


def declared(package: str) -> set[str]:
    """Return the distributions that the package's own project or one of its extras names."""
    folder = ROOT / package if (ROOT / package / "pyproject.toml").exists() else ROOT
    extras = EXTRAS[package]
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name])]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def imported(source: str) -> Iterator[str]:
    """Top-level names of all absolute imports, those inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


DISTRIBUTIONS = importlib.metadata.packages_distributions()


def undeclared(source: str, package: str) -> set[str]:
    foreign = set(imported(source)) - sys.stdlib_module_names - OWN
    known = declared(package)
    return {name for name in foreign if not {canonicalize_name(by) for by in DISTRIBUTIONS.get(name, [name])} & known}


@pytest.mark.parametrize("package", sorted(OWN))
def test_every_import_is_declared(package: str) -> None:
    missing = {
        path.relative_to(ROOT).as_posix(): names
        for path in sorted((ROOT / package).rglob("*.py"))
        if ELSEWHERE not in path.parents
        and "tests" not in path.parts
        and (names := undeclared(path.read_text(encoding="utf-8"), package))
    }
    assert missing == {}


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("app", "import markupsafe"),
        ("connector", "def late():\n    from fastapi_anything import x"),
        ("hana_emulator", "import hdbcli.dbapi"),
        ("owl_sap_client", "import torch"),
    ],
)
def test_an_undeclared_import_is_found(package: str, line: str) -> None:
    assert len(undeclared(line, package)) == 1

"""Rules about the shape of the code that no linter knows: sizes, empty packages, the map of the tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = sorted(
    path for package in ("app", "connector", "hana_emulator/hana_emulator") for path in (ROOT / package).rglob("*.py")
)
LONGEST_FUNCTION = 80
LONGEST_FILE = 600


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function of a file, nested ones included, with its length in lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("path", SOURCE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_function_is_too_long(path: Path) -> None:
    assert [(name, lines) for name, lines in functions(path) if lines > LONGEST_FUNCTION] == []


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE} == {}


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCE
        if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(ast.parse(path.read_bytes()))
    ]
    assert silent == []


def test_core_package_is_empty() -> None:
    # An import here would make `python -m app.src.core.t4_gpu_optimizer` warn that it is already in sys.modules.
    assert (ROOT / "app/src/core/__init__.py").read_text(encoding="utf-8").strip() == ""


def test_backend_protocol_stays_on_one_screen() -> None:
    assert len((ROOT / "app/src/core/backends/__init__.py").read_text(encoding="utf-8").splitlines()) <= 100


def test_tests_are_no_packages() -> None:
    # With --import-mode=importlib an __init__.py in a folder named like a package of ours would shadow that package.
    assert sorted((ROOT / "tests").rglob("__init__.py")) == []
    assert not {"app", "hana_emulator"} & {path.name for path in (ROOT / "tests").iterdir()}


MAP_LINE = re.compile(r"^(?P<indent> *)(?P<name>[\w.@-]+/?)(?: +\S.*)?$")


def module_map() -> set[str]:
    """Paths named in the first block of docs/architecture.md from `connector/` on, folders with a trailing slash."""
    blocks = re.findall(
        r"^```text\n(.*?)^```", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.S | re.M
    )
    block = next(block for block in blocks if block.startswith("connector/"))
    paths: set[str] = set()
    folders: list[tuple[int, str]] = []
    for line in block.splitlines():
        match = MAP_LINE.match(line)
        assert match, f"not a line of the map: {line!r}"
        indent, name = len(match["indent"]), match["name"]
        folders = [(depth, folder) for depth, folder in folders if depth < indent]
        path = (folders[-1][1] if folders else "") + name
        paths.add(path)
        if name.endswith("/"):
            folders.append((indent, path))
    return paths


def test_module_map_names_only_what_is_there() -> None:
    assert {path for path in module_map() if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("folder", ["connector", "app/src", "app/src/core"])
def test_module_map_is_complete(folder: str) -> None:
    here = {
        f"{folder}/{path.name}" + ("/" if path.is_dir() else "")
        for path in (ROOT / folder).iterdir()
        if path.name != "__pycache__" and path.name != "__init__.py" and (path.is_dir() or path.suffix == ".py")
    }
    assert here - module_map() == set()

"""The import contracts of pyproject.toml hold on the tree; each planted violation breaks the contract meant for it."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("app", "connector", "hana_emulator", "owl_sap_client")

NEW_MODULE = "ANSWER = 42"

PLANTED = [
    # module, line to add, contract that must break
    ("app/extra.py", NEW_MODULE, "layers of app"),
    ("connector/sync/run.py", "import hdbcli.dbapi", "hdbcli stays in connector.hana.connection"),
    ("app/src/service/service.py", "from hdbcli import dbapi", "hdbcli stays in connector.hana.connection"),
    ("connector/stores/local/store.py", "import torch", "the connector knows no app, no GPU, no HTTP"),
    ("connector/hana/connection.py", "from app.src import settings", "the connector knows no app, no GPU, no HTTP"),
    ("connector/model.py", "import httpx", "the connector knows no app, no GPU, no HTTP"),
    ("connector/hana/catalog.py", "from connector import document", "layers of the connector"),
    ("connector/hana/source.py", "from connector import document", "layers of the connector"),
    ("connector/errors.py", "from connector import hana", "layers of the connector"),
    ("connector/sync/run.py", "def late() -> None:\n    from connector import verify", "layers of the connector"),
    ("connector/stores/hana/store.py", "from connector.stores import local", "layers of the stores"),
    ("connector/stores/scan.py", "from connector.stores import local", "layers of the stores"),
    ("connector/utils.py", NEW_MODULE, "layers of the connector"),
    ("app/src/core/engine.py", "from connector import model", "core knows no HANA, no HTTP, no settings, no metrics"),
    ("app/src/core/device.py", "from app.src.core import engine", "layers of core"),
    ("app/src/core/helpers.py", NEW_MODULE, "layers of core"),
    ("app/src/core/onnx_export/graph.py", "from app.src.core.onnx_export import quantise", "layers of the ONNX export"),
    ("app/src/core/memory.py", "from app.src import settings", "core knows no HANA, no HTTP, no settings, no metrics"),
    ("app/src/core/memory.py", "from app.src import metrics", "core knows no HANA, no HTTP, no settings, no metrics"),
    ("app/src/service/service.py", "import torch", "torch stays in app.src.core"),
    ("app/src/observe/doctor/machine.py", "import sentence_transformers", "torch stays in app.src.core"),
    ("app/src/service/service.py", "from fastapi import FastAPI", "fastapi stays in app.src.api"),
    ("app/src/jobs/runner.py", "from starlette import status", "fastapi stays in app.src.api"),
    ("app/src/jobs/runner.py", "from app.src import service", "layers of app.src"),
    ("app/src/service/service.py", "from app.src import cli", "layers of app.src"),
    ("app/src/settings/model.py", "from app.src import service", "layers of app.src"),
    ("app/src/mcp/server.py", "from app.src import api", "layers of app.src"),
    ("app/src/mcp/tools.py", "from app.src.mcp import server", "layers of the tools for agents"),
    ("app/src/service/service.py", "from mcp.server.lowlevel import Server", "the MCP SDK stays in app.src.mcp"),
    ("app/src/api/agents.py", "import mcp_types", "the MCP SDK stays in app.src.mcp"),
    ("app/src/mcp/http.py", "from starlette.requests import Request", "fastapi stays in app.src.api"),
    ("app/src/access/keys.py", "from app.src.access import tokens", "layers of access"),
    ("app/src/misc.py", NEW_MODULE, "layers of app.src"),
    ("app/src/benchmark/side_by_side.py", "from app.src.benchmark import report", "layers of the benchmarks"),
    ("owl_sap_client/owl_sap_client/__init__.py", "from connector import errors", "the client stands alone"),
    ("app/src/demo.py", "import owl_sap_client", "nobody builds on the client"),
    ("app/src/demo.py", "import hana_emulator", "production code never imports the stand-in"),
    ("connector/stores/hana/store.py", "from hana_emulator import types", "production code never imports the stand-in"),
    (
        "hana_emulator/hana_emulator/types.py",
        "from connector import model",
        "the stand-in shares no code with what it tests",
    ),
    (
        "hana_emulator/hana_emulator/session.py",
        "from hana_emulator.sql import database",
        "wire and SQL meet at the seam",
    ),
    ("hana_emulator/hana_emulator/protocol/packet.py", "import hana_emulator.sql", "wire and SQL meet at the seam"),
    (
        "hana_emulator/hana_emulator/sql/database.py",
        "from hana_emulator.protocol import packet",
        "layers of the stand-in",
    ),
    ("hana_emulator/hana_emulator/seam.py", "from hana_emulator import session", "layers of the stand-in"),
]


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on `tree`, in a process of its own: here `app` is imported already, from the real tree."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    command = [sys.executable, "-P", "-c", code]
    environment = {
        "PYTHONPATH": f"{tree}:{tree}/hana_emulator:{tree}/owl_sap_client",
        "COLUMNS": "200",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=60, check=False)


def verdicts(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Contract -> KEPT or BROKEN."""
    return dict(re.findall(r"^(.+?) (KEPT|BROKEN)(?: \(.*\))?$", result.stdout, re.M))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code alone, to plant violations in."""
    copy = tmp_path_factory.mktemp("tree")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=lambda folder, names: _not_code(folder, names))
    shutil.copy(ROOT / ".importlinter", copy)
    return copy


def _not_code(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith(".py") and not (Path(folder) / name).is_dir()]


@contextmanager
def planted(path: Path, line: str) -> Iterator[None]:
    before = path.read_bytes() if path.exists() else None
    path.write_bytes((before or b"") + b"\n" + line.encode() + b"\n")
    try:
        yield
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)


def test_contracts_hold() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("module", "line", "contract"), PLANTED, ids=[f"{m}: {line}" for m, line, _ in PLANTED])
def test_planted_violation_is_caught(tree: Path, module: str, line: str, contract: str) -> None:
    with planted(tree / module, line):
        result = lint_imports(tree)
    assert result.returncode == 1, result.stdout + result.stderr
    assert verdicts(result)[contract] == "BROKEN", result.stdout


def test_violations_are_planted_into_modules_that_exist() -> None:
    """A file planted beside a package of its name would be shadowed by it."""
    assert [module for module, line, _ in PLANTED if line != NEW_MODULE and not (ROOT / module).is_file()] == []
    for module in (module for module, line, _ in PLANTED if line == NEW_MODULE):
        assert not (ROOT / module).exists()
        assert not (ROOT / module).with_suffix("").exists()


def test_every_contract_has_a_planted_violation(tree: Path) -> None:
    assert set(verdicts(lint_imports(tree))) == {contract for _, _, contract in PLANTED}


BY_NAME = {
    "hdbcli": "connector/hana/connection.py",
    "torch": "app/src/core/",
    "transformers": "app/src/core/",
    "sentence_transformers": "app/src/core/",
    "fastapi": "app/src/api/",
    "mcp": "app/src/mcp/",
    "hana_emulator": "hana_emulator/",
}


def imported_by_name(path: Path) -> Iterator[str]:
    """Packages that a file imports through a string, which import-linter cannot see."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value.partition(".")[0]


def test_imports_by_name_keep_to_the_same_rules() -> None:
    places = {
        (package, path.relative_to(ROOT).as_posix())
        for root in PACKAGES
        for path in (ROOT / root).rglob("*.py")
        for package in imported_by_name(path)
    }
    assert [
        (package, place) for package, place in sorted(places) if not place.startswith(BY_NAME.get(package, ""))
    ] == []
    # The driver is optional and comes late, so its one import is of this kind.
    assert ("hdbcli", "connector/hana/connection.py") in places

"""Check what linters do not: that each import contract holds and can fail, declared dependencies, sizes, docstrings.

scripts/check runs this in one process. Violations are planted in the import graph, not in files.
"""

from __future__ import annotations

import ast
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from grimp import ImportGraph, build_graph
from importlinter.application.use_cases import read_user_options
from importlinter.configuration import configure
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
# Import name -> its folder.
PACKAGES = {
    "app": "app",
    "connector": "connector",
    "hana_emulator": "hana_emulator/hana_emulator",
    "owl_sap_client": "owl_sap_client/owl_sap_client",
}
LINES_MAX = 900
CONTRACTS = {"layers": LayersContract, "forbidden": ForbiddenContract}

# Importer, imported, the contract that must break. Importers are packages, so that files may move inside them. Layers
# need no entry: for each contract, an import from the lowest layer to the highest is planted.
PLANTS = [
    ("app.src.core", "connector", "core knows no HANA, no HTTP, no settings, no metrics"),
    ("app.src.core", "app.src.settings", "core knows no HANA, no HTTP, no settings, no metrics"),
    ("app.src.core", "app.src.observe.metrics", "core knows no HANA, no HTTP, no settings, no metrics"),
    ("connector.stores.local", "torch", "the connector knows no app, no GPU, no HTTP"),
    ("connector.model", "httpx", "the connector knows no app, no GPU, no HTTP"),
    ("connector.hana", "app.src.settings", "the connector knows no app, no GPU, no HTTP"),
    ("connector.sync", "hdbcli", "hdbcli stays in connector.hana.connection"),
    ("app.src.service", "hdbcli", "hdbcli stays in connector.hana.connection"),
    ("app.src.service", "torch", "torch stays in app.src.core"),
    ("app.src.observe", "sentence_transformers", "torch stays in app.src.core"),
    ("app.src.service", "ray", "ray stays in app.src.scaling.cluster"),
    ("app.src.service", "mcp", "the MCP SDK stays in app.src.mcp"),
    ("app.src.api", "mcp_types", "the MCP SDK stays in app.src.mcp"),
    ("app.src.service", "fastapi", "fastapi stays in app.src.api"),
    ("app.src.jobs", "starlette", "fastapi stays in app.src.api"),
    ("app.src.mcp", "starlette", "fastapi stays in app.src.api"),
    ("owl_sap_client", "connector.errors", "the client imports no package of ours"),
    ("app.src", "owl_sap_client", "no package imports the client"),
    ("app.src", "hana_emulator", "production code never imports the emulator"),
    ("connector.stores.hana", "hana_emulator", "production code never imports the emulator"),
    ("hana_emulator", "connector.model", "the emulator shares no code with what it tests"),
    ("hana_emulator.session", "hana_emulator.sql", "wire and SQL meet at the seam"),
    ("hana_emulator.protocol", "hana_emulator.sql", "wire and SQL meet at the seam"),
]

# Packages imported by a string, which the graph misses -> the only place that may do that.
BY_NAME = {
    "hdbcli": "connector/hana/connection.py",
    "torch": "app/src/core/",
    "transformers": "app/src/core/",
    "sentence_transformers": "app/src/core/",
    "fastapi": "app/src/api/",
    "mcp": "app/src/mcp/",
    "ray": "app/src/scaling/cluster.py",
    "hana_emulator": "hana_emulator/",
}

# Extras for users, not developers.
EXTRAS = {
    "app": {"hana", "engine", "serve", "onnx", "tensorrt", "train", "langchain", "mcp", "benchmark", "ray"},
    "connector": {"hana", "langchain"},
    "hana_emulator": set(),
    "owl_sap_client": {"langchain"},
}
# These run in their own environments (scripts/peers) and import each other by name.
ELSEWHERE = "app/src/benchmark/workers/"
# Installed by test suites that use the emulator's fixture; brought by torch's builds for CUDA.
BROUGHT = {"hana_emulator": {"hdbcli", "pytest"}, "app": {"triton"}}

Options = dict[str, Any]


SESSION: Options = {"root_packages": list(PACKAGES), "include_external_packages": "True"}


def broken(graph: ImportGraph, contract: Options) -> bool:
    checked = CONTRACTS[contract["type"]](contract["name"], session_options=SESSION, contract_options=contract)
    return not checked.check(deepcopy(graph), verbose=False).kept


def contract_faults() -> Iterator[str]:
    """Yield broken contracts, and contracts that a planted violation does not break."""
    configure()
    options = read_user_options(str(ROOT / ".importlinter"))
    contracts = {contract["name"]: contract for contract in options.contracts_options}
    graph = build_graph(*PACKAGES, include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None)
    kept = {name: not broken(graph, contract) for name, contract in contracts.items()}
    for name in (name for name, is_kept in kept.items() if not is_kept):
        yield f"contract {name!r} is broken; lint-imports says where"
    plants = list(PLANTS)
    for name, contract in contracts.items():
        if contract["type"] != "layers":
            continue
        container = contract["containers"][0]
        ends = (contract["layers"][-1], contract["layers"][0])
        lowest, highest = (line.replace("|", ":").strip("() ").split(":")[0].strip() for line in ends)
        plants.append((f"{container}.{lowest}", f"{container}.{highest}", name))
        if contract.get("exhaustive") in ("True", True) and kept[name]:
            new = deepcopy(graph)
            new.add_module(f"{container}.a_new_module")
            if not broken(new, contract):
                yield f"contract {name!r} allows a module that it does not name"
    for importer, imported, name in plants:
        if importer not in graph.modules or name not in contracts:
            yield f"plant {importer} -> {imported} ({name!r}): unknown importer or contract"
            continue
        changed = deepcopy(graph)
        if imported not in changed.modules:
            changed.add_module(imported, is_squashed=imported.partition(".")[0] not in PACKAGES)
        changed.add_import(importer=importer, imported=imported)
        if kept[name] and not broken(changed, contracts[name]):
            yield f"contract {name!r} allows {importer} -> {imported}"
    for name in contracts.keys() - {name for _, _, name in plants}:
        yield f"contract {name!r} has no planted violation in {Path(__file__).name}"


def source_faults(package: str, folder: str) -> Iterator[str]:
    """Yield files that are too long or lack a docstring, undeclared imports, and imports by name in the wrong place."""
    distributions = importlib.metadata.packages_distributions()
    home = ROOT / package if (ROOT / package / "pyproject.toml").exists() else ROOT
    project = tomllib.loads((home / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {})
    required = [*project["dependencies"], *(line for extra in EXTRAS[package] for line in extras.get(extra, []))]
    declared = {canonicalize_name(Requirement(line).name) for line in required}
    for path in sorted((ROOT / folder).rglob("*.py")):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        if (lines := text.count("\n")) > LINES_MAX:
            yield f"{name}: {lines} lines, at most {LINES_MAX}"
        if text.strip() and not ast.get_docstring(tree):
            yield f"{name}: no docstring"
        # Top-level names of absolute imports, including those inside functions, and of imports by a string.
        nodes = list(ast.walk(tree))
        modules = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0]
        modules += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        written = {module.partition(".")[0] for module in modules if module}
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        importing = [call for call in calls if ast.unparse(call.func).endswith(("import_module", "__import__"))]
        texts = [each.value for call in importing for each in call.args if isinstance(each, ast.Constant)]
        by_name = {text.partition(".")[0] for text in texts if isinstance(text, str)}
        for each in by_name & BY_NAME.keys():
            if not name.startswith(BY_NAME[each]):
                yield f"{name}: imports {each} by name, which only {BY_NAME[each]} may"
        if name.startswith(ELSEWHERE):
            continue
        for each in written - sys.stdlib_module_names - set(PACKAGES) - BROUGHT.get(package, set()):
            if not {canonicalize_name(by) for by in distributions.get(each, [each])} & declared:
                yield f"{name}: imports {each}, which no dependency of {package} in pyproject.toml declares"


def main() -> int:
    found = [*contract_faults(), *(fault for each in PACKAGES.items() for fault in source_faults(*each))]
    if (ROOT / "app/src/core/__init__.py").read_text(encoding="utf-8").strip():
        # Otherwise `python -m app.src.core.t4_gpu_optimizer` warns that it is already in sys.modules.
        found.append("app/src/core/__init__.py: must be empty")
    for folder in ("tests", "hana_emulator/tests", "owl_sap_client/tests"):
        # With --import-mode=importlib this file would shadow a package of the same name.
        packages = (ROOT / folder).rglob("__init__.py")
        found += [f"{path.relative_to(ROOT)}: a folder of tests must not be a package" for path in packages]
    sys.stderr.writelines(f"{fault}\n" for fault in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "hana_emulator"), str(ROOT / "owl_sap_client")]
    sys.exit(main())

"""What must run where torch cannot be imported: help, status, config and everything with the test embedder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hana_emulator.testing import Emulator

ROOT = Path(__file__).parents[2]
BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "sentence_transformers", "tokenizers"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
"""
RUN_ALL = """
import json, sys
from typer.testing import CliRunner
from app.src.cli import app

done = [CliRunner().invoke(app, arguments) for arguments in json.load(sys.stdin)]
print(json.dumps([[run.exit_code, run.stdout, run.stderr] for run in done]))
"""


def block(folder: Path) -> Path:
    """A folder that blocks torch for the Python that has it in its path."""
    (folder / "blocked").mkdir()
    (folder / "blocked" / "sitecustomize.py").write_text(BLOCK)
    return folder / "blocked"


def without_torch(
    folder: Path, *command: str, stdin: str = "", model: str = "hash:16", more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`python COMMAND`."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={
            "PYTHONPATH": f"{block(folder)}:{ROOT}",
            "OWL_SAP_EMBEDDING__MODEL": model,
            "OWL_SAP_STORE__KIND": "local",
            "OWL_SAP_STORE__PATH": "vectors",
            **(more or {}),
        },
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_block_works(tmp_path: Path) -> None:
    code = "import importlib.util, sys; sys.exit(0 if 'Blocked' in str(sys.meta_path[0]) else 1)"
    environ = {"PYTHONPATH": str(block(tmp_path))}
    assert subprocess.run([sys.executable, "-c", code], env=environ, check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["embed", "--json"],
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (["--help"], ["status", "--json"], ["config", "show"])
        ),
    ],
)
def test_runs_without_torch(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "owl-sap.toml").write_text('[[collections]]\nname = "a"\nsource = "S.T"\ntemplate = "{X}"\n')
    run = without_torch(tmp_path, "-m", "app", *arguments, stdin="steel\n")
    assert run.returncode == 0, run.stderr


def test_without_torch_a_real_model_is_refused_clearly(tmp_path: Path) -> None:
    (tmp_path / "owl-sap.toml").write_text('[embedding]\nmodel = "all-MiniLM-L6-v2"\n')
    run = without_torch(tmp_path, "-m", "app", "embed", stdin="steel\n", model="")
    assert run.returncode == 2, run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
    assert "torch" in run.stderr or "engine" in run.stderr


def imported(code: str, packages: set[str], folder: Path) -> str:
    """Return which of these packages a new process has imported after `code`."""
    run = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(sorted({packages} & set(sys.modules)))"],
        env={"PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return run.stdout.strip()


def test_help_is_quick_because_it_imports_no_heavy_package(tmp_path: Path) -> None:
    heavy = {"torch", "transformers", "tokenizers", "fastapi", "uvicorn", "hdbcli", "numpy", "pydantic", "httpx", "jwt"}
    assert imported("import app.src.cli", heavy, tmp_path) == "[]"


def test_a_service_imports_only_what_a_search_needs(tmp_path: Path) -> None:
    code = (
        "from app.src.cli.application import opened\n"
        "with opened() as service: service.metrics.search_seconds.labels('a').observe(1)\n"
    )
    late = {"torch", "tokenizers", "jwt", "cryptography", "tenacity", "tomlkit", "hdbcli"}
    late |= {"prometheus_client", "asyncio", "rich.table"}
    assert imported(code, late, tmp_path) == "[]"


@pytest.mark.parametrize("kind", [pytest.param("hana", marks=pytest.mark.slow), "local"])
def test_sync_verify_and_search_without_torch(tmp_path: Path, emulator: Emulator, hana_schema: str, kind: str) -> None:
    """In one process."""
    connection = emulator.connect(autocommit=True, currentSchema=hana_schema)
    cursor = connection.cursor()
    cursor.execute('CREATE TABLE "T" ("K" NVARCHAR(5) PRIMARY KEY, "X" NVARCHAR(50))')
    cursor.executemany('INSERT INTO "T" VALUES (?, ?)', [("a", "steel pump"), ("b", "rubber seal"), ("c", None)])
    connection.close()
    (tmp_path / "owl-sap.toml").write_text(
        f"[[collections]]\nname = 'c'\nsource = '{hana_schema}.T'\ntemplate = '{{X}}'\n", encoding="utf-8"
    )
    login = {"HOST": emulator.host, "PORT": str(emulator.port), "USER": emulator.user, "PASSWORD": emulator.password}
    more = {f"HANA_{name}": value for name, value in login.items()}
    more |= {"HANA_ENCRYPT": "false", "HANA_SCHEMA": hana_schema, "OWL_SAP_STORE__KIND": kind}
    verbs = (["sync", "c"], ["verify", "c"], ["search", "c", "rubber seal", "-k", "1"])
    run = without_torch(tmp_path, "-c", RUN_ALL, stdin=json.dumps([[*verb, "--json"] for verb in verbs]), more=more)
    assert run.returncode == 0, run.stderr
    done = json.loads(run.stdout)
    assert [code for code, _, _ in done] == [0, 0, 0], done
    (report,), verified, (hit,) = (json.loads(out) for _, out, _ in done)
    assert (report["upserted"], report["empty"]) == (2, 1)
    assert verified["ok"] is True
    assert hit["key"] == {"K": "b"}

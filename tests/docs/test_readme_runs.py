"""The README's blocks marked `bash run` do run, with the README's own configuration, against the emulator."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hdbcli import dbapi

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS, REQUESTS = re.findall(r"^```bash run\n(.*?)^```", README, re.S | re.M)
TOML = re.findall(r"^```toml\n(.*?)^```", README, re.S | re.M)[0]
ADDRESS = "http://127.0.0.1:8000"


@contextmanager
def started(arguments: list[str], folder: Path, environment: dict[str, str]) -> Iterator[dict[str, Any]]:
    """A program of ours that says in one JSON line that it is up."""
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder with the README's owl-sap.toml, an environment that leads to an emulator, and `owl-sap` on PATH."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "owl-sap.toml").write_text(TOML)
    tool = folder / "owl-sap"
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m app "$@"\n')
    tool.chmod(0o755)
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith(("HANA_", "OWL_SAP_"))},
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OWL_SAP_EMBEDDING__MODEL": "hash:384",
        "OWL_SAP_API__PORT": "0",
        "HANA_ENCRYPT": "false",
    }
    arguments = ["hana_emulator", "--port", "0", "--sample"]
    with started(arguments, folder, environment) as hana:
        for name in ("host", "port", "user", "password"):
            environment[f"HANA_{name.upper()}"] = str(hana[name])
        create_schema(hana, "VECTORS")
        yield folder, environment


def create_schema(hana: dict[str, Any], schema: str) -> None:
    """What the README leaves to the administrator."""
    login = {name: hana[name] for name in ("user", "password", "port")} | {"connectTimeout": 10_000}
    with closing(dbapi.connect(address=hana["host"], **login)) as connection:
        connection.cursor().execute(f'CREATE SCHEMA "{schema}"')


def bash(script: str, workplace: tuple[Path, dict[str, str]]) -> str:
    """Run line by line as a reader would; the first line that fails ends it. Returns stdout."""
    folder, environment = workplace
    # Without this curl calls an HTTP error a success.
    script = 'curl() { command curl --fail-with-body "$@"; echo; }\n' + script
    command = ["bash", "-euo", "pipefail", "-c", script]
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.slow
def test_commands_then_requests(workplace: tuple[Path, dict[str, str]]) -> None:
    output = bash(COMMANDS, workplace)
    assert "materials" in output
    (hits,) = [json.loads(line) for line in output.splitlines() if line.startswith("[{")]
    assert hits
    assert all(hit["metadata"]["MTART"] == "ERSA" for hit in hits)
    if shutil.which("curl") is None and os.environ.get("CI") != "true":
        pytest.skip("curl is missing")
    folder, environment = workplace
    with started(["app", "serve"], folder, environment) as service:
        answers = bash(REQUESTS.replace(ADDRESS, service["url"].rstrip("/")), workplace)
    documents = [json.loads(line) for line in answers.splitlines() if line.startswith(("{", "["))]
    ready, found, vectors, job, jobs = documents
    assert ready["status"]
    assert len(found["hits"]) == 3
    assert len(vectors["data"][0]["embedding"]) == 384
    assert job["job"] in [record["id"] for record in jobs]
    assert "owl_sap_build_info" in answers


@pytest.mark.slow
def test_demo_runs() -> None:
    first = re.findall(r"^```bash\n(.*?)^```", README, re.S | re.M)[0].strip()
    assert first == "./scripts/demo"
    result = subprocess.run([first], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr

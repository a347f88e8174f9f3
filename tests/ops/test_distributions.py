"""The three distributions install alone, and the oldest declared versions of what the root depends on work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HINT = "import sys; sys.modules['fastapi'] = None\nfrom app.src.cli import main\nmain()"


def run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def installed(folder: Path, *wanted: str, resolution: str = "highest") -> Path:
    """Make an environment in `folder` with `wanted` and return its Python."""
    uv = str(Path(sys.executable).with_name("uv"))
    done = run(uv, "venv", "--quiet", "--python", sys.executable, str(folder / "venv"))
    assert done.returncode == 0, done.stderr
    python = folder / "venv/bin/python"
    done = run(uv, "pip", "install", "--quiet", "--python", str(python), "--resolution", resolution, *wanted)
    assert done.returncode == 0, done.stderr
    return python


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HINT, "serve", "--port", "0"],
        cwd=tmp_path,
        env={"OWL_SAP_EMBEDDING__MODEL": "hash:64", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "the REST service needs fastapi" in done.stderr
    assert "[serve]" in done.stderr


@pytest.mark.slow
def test_the_emulator_installs_and_runs_alone(tmp_path: Path) -> None:
    python = installed(tmp_path, str(ROOT / "hana_emulator"))
    command = [str(python.with_name("hana-emulator")), "--port", "0", "--sample"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as emulator:
        assert emulator.stdout is not None
        assert set(json.loads(emulator.stdout.readline())) >= {"host", "port", "user", "password", "schema"}
        emulator.terminate()
        assert emulator.wait(60) == 0
    assert "owl-sap-connector" not in run(str(python), "-m", "hana_emulator", "--help", cwd=tmp_path).stdout


@pytest.mark.slow
def test_the_client_installs_with_httpx_alone(tmp_path: Path) -> None:
    python = installed(tmp_path, str(ROOT / "owl_sap_client"))
    done = run(str(python), "-c", "import owl_sap_client; print(owl_sap_client.Client.__name__)", cwd=tmp_path)
    assert done.stdout == "Client\n", done.stderr


@pytest.mark.slow
def test_the_lowest_declared_versions_sync_and_search(tmp_path: Path) -> None:
    """Without the engine: torch alone would take minutes. The embedder of tests stands in for a model."""
    python = installed(tmp_path, f"{ROOT}[hana,serve]", str(ROOT / "hana_emulator"), resolution="lowest-direct")
    done = run(str(python), str(ROOT / "scripts/record_interface.py"), str(tmp_path / "seen"), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    recorded = (tmp_path / "seen/json-hana.txt").read_text(encoding="utf-8")
    assert '"verb": "sync materials"' in recorded
    assert '"exit": 4' not in recorded

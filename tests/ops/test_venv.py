"""scripts/lib/venv.sh: one environment, made once, with a stub in place of Python and pip."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.ops.conftest import Host

ROOT = Path(__file__).resolve().parents[2]

PYTHON = """#!/usr/bin/env bash
case "$*" in
  -c*) [[ ${STUB_PYTHON:-new} == new ]] ;;
  --version) echo "Python 3.11.0 (stub)" ;;
  "-m venv "*)
    printf 'venv\\n' >>"$STUB_LOG"
    [[ ${STUB_VENV:-works} == works ]] || exit 1
    mkdir -p "$3/bin"; cat "$0" >"$3/bin/python"; chmod +x "$3/bin/python" ;;
  "-m pip install"*)
    printf 'pip %s\\n' "${*: -1}" >>"$STUB_LOG"
    [[ ${STUB_PIP:-works} == works ]] || { echo "pip: no network" >&2; exit 1; } ;;
esac
"""


@pytest.fixture
def project(host: Host) -> Host:
    (host.folder / "scripts/lib").mkdir(exist_ok=True)
    shutil.copy(ROOT / "scripts/lib/venv.sh", host.folder / "scripts/lib/venv.sh")
    (host.folder / "pyproject.toml").write_text("[project]\n")
    host.stub("python3", PYTHON)
    (host.folder / "go").write_text('source scripts/lib/venv.sh; ensure_venv "$1"\n')
    return host


def ensure(project: Host, extra: str) -> subprocess.CompletedProcess[str]:
    return project.run("go", extra)


def installed(project: Host) -> list[str]:
    return [line.rpartition("[")[2].rstrip("]") for line in project.log.splitlines() if line.startswith("pip")]


def test_made_and_installed_once(project: Host) -> None:
    for _ in range(3):
        assert ensure(project, "demo").returncode == 0
    assert project.log.splitlines() == ["venv", f"pip {project.folder}[demo]"]


def test_test_extra_holds_the_demo(project: Host) -> None:
    for extra in ("demo", "test", "demo", "test"):
        ensure(project, extra)
    assert installed(project) == ["demo", "test"]


def test_changed_pyproject_installs_again(project: Host) -> None:
    ensure(project, "test")
    (project.folder / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    ensure(project, "test")
    assert installed(project) == ["test", "test"]


def test_failing_pip_fails_loudly_and_is_tried_again(project: Host) -> None:
    project.variables["STUB_PIP"] = "fails"
    result = ensure(project, "demo")
    assert result.returncode == 1
    assert "pip could not install owl-sap-connector[demo]" in result.stderr
    assert "pip: no network" in result.stderr
    project.variables["STUB_PIP"] = "works"
    assert ensure(project, "demo").returncode == 0
    assert installed(project) == ["demo", "demo"]


def test_interrupted_creation_starts_over(project: Host) -> None:
    project.variables["STUB_VENV"] = "fails"
    assert ensure(project, "demo").returncode == 1
    project.variables["STUB_VENV"] = "works"
    assert ensure(project, "demo").returncode == 0
    assert project.log.splitlines()[:2] == ["venv", "venv"]


def test_old_python_is_refused_by_name(project: Host) -> None:
    project.variables["STUB_PYTHON"] = "old"
    result = ensure(project, "demo")
    assert result.returncode == 1
    assert "Python 3.11 or newer" in result.stderr
    assert project.log == ""


def test_named_python_is_taken_or_refused(project: Host) -> None:
    project.variables["PYTHON"] = "/nowhere/python"
    result = ensure(project, "demo")
    assert result.returncode == 1
    assert "PYTHON=/nowhere/python" in result.stderr

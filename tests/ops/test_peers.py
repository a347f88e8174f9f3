"""scripts/peers: what it says before it starts anything, and that its exclusions are written where the docs say so."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/peers"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_help_names_both_peers_and_where_their_code_is() -> None:
    shown = run("--help")
    assert shown.returncode == 0
    for part in ("langchain-hana CHECKOUT", "sqlalchemy-hana CHECKOUT", "https://github.com/SAP/"):
        assert part in shown.stdout


@pytest.mark.parametrize("arguments", [(), ("hana-ml", "."), ("langchain-hana",), ("sqlalchemy-hana", "/nowhere")])
def test_wrong_arguments_end_with_2(arguments: tuple[str, ...]) -> None:
    refused = run(*arguments)
    assert refused.returncode == 2
    assert refused.stderr


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    refused = run("langchain-hana", str(tmp_path))
    assert refused.returncode == 2
    assert "is it a checkout of langchain-hana?" in refused.stderr


def test_the_environment_of_its_own_is_ignored_by_git() -> None:
    assert ".venv-peers/" in (ROOT / ".gitignore").read_text().splitlines()

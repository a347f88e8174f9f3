"""scripts/lib/release.py: tag, version and changelog agree before a release is built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = "# Changelog\n\n## 1.2.0 ({day})\n\n- New: search.\n\n## 1.1.0 (2026-01-01)\n\n- Old.\n"


def release(root: Path, tag: str) -> subprocess.CompletedProcess[str]:
    """The script reads the files of the folder two levels above its own."""
    script = root / "scripts" / "lib" / "release.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_bytes((ROOT / "scripts/lib/release.py").read_bytes())
    (root / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1.2.0"\n')
    return subprocess.run([sys.executable, str(script), tag], capture_output=True, text=True, timeout=60, check=False)


def test_the_notes_of_a_release_are_its_section_of_the_changelog(tmp_path: Path) -> None:
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG.format(day="2026-11-23"))
    done = release(tmp_path, "v1.2.0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "- New: search.\n", "")


@pytest.mark.parametrize(
    ("tag", "day", "problem"),
    [
        ("v1.3.0", "2026-11-23", "the tag is v1.3.0, but pyproject.toml says version 1.2.0"),
        ("1.2.0", "2026-11-23", "the tag must be v1.2.0"),
        ("v1.2.0", "unreleased", 'dates 1.2.0 "unreleased"'),
    ],
)
def test_a_release_that_does_not_agree_is_refused(tmp_path: Path, tag: str, day: str, problem: str) -> None:
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG.format(day=day))
    done = release(tmp_path, tag)
    assert done.returncode == 1
    assert problem in done.stderr
    assert done.stdout == ""


def test_a_release_without_a_section_in_the_changelog_is_refused(tmp_path: Path) -> None:
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n")
    done = release(tmp_path, "v1.2.0")
    assert done.returncode == 1
    assert 'no section "## 1.2.0' in done.stderr

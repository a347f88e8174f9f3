"""Check that a release's tag, the version in pyproject.toml and a dated section of CHANGELOG.md agree. Prints that
section's text for the release page.

    python scripts/lib/release.py v0.2.0
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def notes(tag: str, root: Path = ROOT) -> str:
    """Return the changelog's text for `tag`; raise ValueError when tag, version and changelog disagree."""
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, but pyproject.toml says version {version}: the tag must be v{version}")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(version)} \(([^)]*)\)\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if section is None:
        raise ValueError(f'CHANGELOG.md has no section "## {version} (YYYY-MM-DD)"')
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", section[1]):
        raise ValueError(f'CHANGELOG.md dates {version} "{section[1]}": write the day of the release, YYYY-MM-DD')
    return section[2].strip()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: release.py TAG")
    try:
        sys.stdout.write(notes(sys.argv[1]) + "\n")
    except ValueError as error:
        sys.exit(f"release: {error}")

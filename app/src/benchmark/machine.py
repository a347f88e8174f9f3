"""On what figures were taken: processor, cores, memory, versions, the commit of the code. Imports none of what it names
the version of.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from app.src.core.device import detect

ROOT = Path(__file__).resolve().parents[3]
"""Of the checkout; where the product was installed from a wheel, the folder of the packages."""
_PACKAGES = ("numpy", "torch", "transformers", "sentence-transformers", "tokenizers", "hdbcli")


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def machine(packages: Sequence[str] = _PACKAGES) -> dict[str, Any]:
    """The machine and the versions of those `packages` that are installed."""
    profile = detect("cpu")
    return {
        "cpu": profile.name,
        "cores": cores(),
        "memory_bytes": profile.memory_bytes,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "owl-sap-connector": _version("owl-sap-connector"),
        "commit": commit(),
        **{name: found for name in packages if (found := _version(name)) is not None},
    }


def load_average() -> float:
    return round(os.getloadavg()[0], 2)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit(root: Path = ROOT) -> str | None:
    """Of the checkout that this code runs from, with "+" where files that belong to it were changed; None where it is
    no checkout, also when it lies inside another one."""
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root:
        return None
    head = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return head and head + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(  # nosec B607 # the git of who measures; no rights are at stake
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

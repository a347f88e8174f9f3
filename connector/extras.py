"""Install commands for a missing extra or the emulator, according to how this package was installed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

DISTRIBUTION = "owl-sap-connector"
# Modules that the extras `serve` and `mcp` install. Both install anyio, but only tools for agents import it first.
_SERVE = {"fastapi", "httptools", "sse_starlette", "starlette", "uvicorn", "uvloop"}
_MCP = {"anyio", "mcp", "mcp_types"}


def missing_module(error: ModuleNotFoundError) -> str | None:
    """Return install advice after a failed import; None for a module that no extra installs."""
    module = (error.name or "").partition(".")[0]
    if module == "hana_emulator":
        return str(error)
    if module in _SERVE:
        return f"the REST service needs {module}, which is not installed: {install_command('serve')}"
    if module in _MCP:
        return f"tools for agents need {module}, which is not installed: {install_command('mcp')}"
    return None


def emulator_command() -> list[str]:
    """Return the command that runs the HANA emulator. Raises ModuleNotFoundError with install advice."""
    found = importlib.util.find_spec("hana_emulator")
    if found is None or found.origin is None:  # no origin: a plain folder hana_emulator/ of a clone
        clone, _ = _clone()
        command = "pip install ./hana_emulator in " + ("a clone" if clone is None else f"the folder {clone}")
        raise ModuleNotFoundError(f"the HANA emulator is not installed: {command}", name="hana_emulator")
    return [sys.executable, "-m", "hana_emulator"]


def install_command(*extras: str, index: str | None = None) -> str:
    """Return the pip command that adds `extras`; in a clone, with the folder to run it in. `index`: a second package
    index."""
    option = "" if index is None else f" --extra-index-url {index}"
    wanted = f"[{','.join(extras)}]"
    clone, editable = _clone()
    if clone is None:
        return f'pip install "{DISTRIBUTION}{wanted}"{option}'
    return f'pip install {"-e " if editable else ""}".{wanted}"{option} in the folder {clone}'


def _clone() -> tuple[Path | None, bool]:
    """Return the folder that this package was installed from (None: a wheel or index), and whether it is editable."""
    from importlib import metadata

    try:
        url_record = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return _with_project(Path(__file__).parents[1]), True
    origin: dict[str, Any] = json.loads(url_record or "{}")
    directory = origin.get("dir_info")
    if directory is None:
        return None, False
    return _with_project(Path(unquote(urlparse(origin["url"]).path))), directory.get("editable", False)


def _with_project(folder: Path) -> Path | None:
    return folder if (folder / "pyproject.toml").is_file() else None

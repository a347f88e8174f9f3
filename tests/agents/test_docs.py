"""docs/agents.md: its JSON is JSON that clients take, its commands and tools exist, its Python compiles."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest
from typer.main import get_command

from app.src.cli import app
from app.src.mcp.tools import TOOLS
from app.src.settings.model import McpSettings
from tests.surface.conftest import ROOT

PAGE = (ROOT / "docs/agents.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.M | re.S)
JSON = [text for kind, text in BLOCKS if kind == "json"]


@pytest.mark.parametrize("text", JSON, ids=range(len(JSON)))
def test_snippets_are_configurations(text: str) -> None:
    document: dict[str, Any] = json.loads(text)
    ((name, server),) = (document.get("mcpServers") or document["servers"]).items()
    assert name == "sap"
    if "command" in server:
        verbs = get_command(app).commands  # type: ignore[attr-defined]
        options = {option for parameter in verbs["mcp"].params for option in parameter.opts} | {"--config"}
        assert "mcp" in server["args"]
        assert {each for each in server["args"] if each.startswith("--")} <= options
    else:
        assert server["url"].endswith("/mcp")
        assert server["headers"]["Authorization"].startswith("Bearer ")


def test_there_are_snippets_for_both_transports_and_both_forms() -> None:
    assert len(JSON) == 4


def test_python_is_python() -> None:
    for kind, text in BLOCKS:
        if kind == "python":
            compile(text, "docs/agents.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_every_tool_and_setting_is_told() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.M)) == set(TOOLS)
    for name in McpSettings.model_fields:
        assert f"`mcp.{name}`" in PAGE

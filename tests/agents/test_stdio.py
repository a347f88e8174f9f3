"""`owl-sap mcp` as a child process, with the SDK's own client and with a plain pipe."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters

from app.src.service import Service
from tests.agents.conftest import offering, rows
from tests.api.conftest import TableSource
from tests.surface.conftest import environment

TOML = """
[store]
kind = "local"
path = "vectors"
[embedding]
model = "hash:64"
[[collections]]
name = "materials"
source = "S.MARA"
key = ["MATNR"]
template = "{MAKTX}"
metadata = ["MTART"]
row_rights = { MTART = "owner" }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a collection that is synced, and settings."""
    folder = tmp_path_factory.mktemp("stdio")
    (folder / "owl-sap.toml").write_text(TOML)
    source = TableSource()
    source.rows_by_key = rows()
    service = Service(offering(folder), source=source)
    service.sync("materials")
    service.close()
    return folder


def command(folder: Path, *arguments: str, **variables: str) -> StdioServerParameters:
    more = ["-m", "app", "mcp", *arguments]
    return StdioServerParameters(command=sys.executable, args=more, cwd=folder, env=environment(**variables))


@pytest.mark.covers("mcp")
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_tools_for_the_program_that_starts_it(folder: Path, mode: str) -> None:
    async with Client(command(folder), mode=mode, cache=None) as client:
        assert {tool.name for tool in (await client.list_tools()).tools} >= {"search", "list_collections"}
        found = await client.call_tool("search", {"collection": "materials", "query": "bearing number 3", "k": 3})
        assert not found.is_error, found
        assert found.structured_content["hits"][0]["key"] == {"MATNR": "03"}

"""Tools over HTTP with the SDK's own client, behind the guard of the service."""

from __future__ import annotations

import pytest

from tests.agents.conftest import Ground


@pytest.mark.covers("POST /mcp")
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_tools_with_both_generations_of_the_protocol(ground: Ground, mode: str) -> None:
    async with ground.client("all", mode=mode) as client:
        assert client.server_info.name == "owl-sap-connector"
        assert {tool.name for tool in (await client.list_tools()).tools} >= {"search", "list_collections"}
        found = await client.call_tool("search", {"collection": "materials", "query": "bearing number 3", "k": 3})
        assert not found.is_error
        assert found.structured_content["untrusted"] is True
        assert found.structured_content["hits"][0]["key"] == {"MATNR": "03"}

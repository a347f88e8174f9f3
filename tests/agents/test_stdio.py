"""`owl-sap mcp` as a child process, with the SDK's own client and with a plain pipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters

from app.src.access.keys import Grant, create, revoke
from app.src.service import Service
from tests.agents.conftest import offering, rows, said
from tests.api.conftest import TableSource
from tests.surface.conftest import ROOT, Cli, environment
from tests.surface.test_torch_free import BLOCK

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


HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}},
}
READY = {"jsonrpc": "2.0", "method": "notifications/initialized"}
LIST = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "list_collections", "arguments": {}}}
SEARCH = {"collection": "materials", "query": "bearing number 3", "k": 20}


@contextmanager
def piped(folder: Path, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "app", "mcp", *arguments]
    with subprocess.Popen(
        command, cwd=folder, env=environment(**variables), stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def write(process: subprocess.Popen[bytes], *messages: Any) -> None:
    assert process.stdin is not None
    for message in messages:
        process.stdin.write(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n")
    process.stdin.flush()


def read(process: subprocess.Popen[bytes], id_: int) -> dict[str, Any]:
    """The answer to this request. Whatever comes on stdout is a message."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        message: dict[str, Any] = json.loads(line)
        assert message["jsonrpc"] == "2.0"
        if message.get("id") == id_:
            return message
    raise AssertionError("stdout has ended")


@pytest.mark.covers("mcp")
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_tools_for_the_program_that_starts_it(folder: Path, mode: str) -> None:
    """Who starts it has the operator's rights: he sees every row, and nothing writes."""
    async with Client(command(folder), mode=mode, cache=None) as client:
        tools = {tool.name for tool in (await client.list_tools()).tools}
        assert tools == {"search", "get_row", "list_collections", "describe_collection", "sync_status"}
        found = await client.call_tool("search", SEARCH)
        assert not found.is_error, said(found)
        hits = found.structured_content["hits"]
        assert hits[0]["key"] == {"MATNR": "03"}
        assert {hit["metadata"]["MTART"] for hit in hits} == {"FERT", "ROH"}
        row = await client.call_tool("get_row", {"collection": "materials", "id": hits[0]["id"]})
        assert row.structured_content["text"] == "bearing number 3"
        refused = await client.call_tool("search", SEARCH | {"collection": "materiels"})
        assert refused.is_error
        assert 'did you mean "materials"' in said(refused)


async def test_with_a_key_its_rows_alone_until_it_is_revoked(folder: Path) -> None:
    keys = folder / "keys.json"
    made, secret = create(keys, Grant("agent", ("search", "sync"), {"owner": ["ROH"]}, rate="6/hour"))
    (folder / "key").write_text(secret + "\n")
    server = command(folder, "--key-file", "key", "--write", OWL_SAP_ACCESS__KEYS="keys.json")
    async with Client(server, cache=None) as client:
        assert "start_sync" in {tool.name for tool in (await client.list_tools()).tools}
        found = await client.call_tool("search", SEARCH)
        assert {hit["metadata"]["MTART"] for hit in found.structured_content["hits"]} == {"ROH"}
        (listed,) = (await client.call_tool("list_collections", {})).structured_content["collections"]
        assert listed["rows"] is None
        answers = [await client.call_tool("list_collections", {}) for _ in range(5)]
        assert [answer.is_error for answer in answers] == [False] * 4 + [True]
        assert "the rate of this key" in said(answers[-1])
        revoke(keys, made.id)
        with anyio.fail_after(10):
            while "rate" in said(refused := await client.call_tool("search", SEARCH)):
                await anyio.sleep(0.1)
        assert refused.is_error
        assert "is refused" in said(refused)
        assert secret not in said(refused)


@pytest.mark.covers("mcp", errors=True)
def test_what_ends_the_start(folder: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "owl-sap.toml").write_text(TOML)
    _, embeds = create(tmp_path / "keys.json", Grant("embeds", ("embed",)))
    (tmp_path / "embeds").write_text(embeds)
    (tmp_path / "wrong").write_text("owl_0000_secret7QX")
    keyed = {"OWL_SAP_ACCESS__KEYS": "keys.json"}
    for arguments, variables, why in (
        (("--key-file", "absent"), keyed, "--key-file: the file cannot be read"),
        (("--key-file", "wrong"), keyed, "is refused"),
        (("--key-file", "wrong"), {}, "neither access.keys nor access.jwt"),
        (("--key-file", "embeds"), keyed, "needs the scope search"),
        ((), keyed | {"OWL_SAP_MCP__KEY_FILE": "wrong"}, "is refused"),
        (("--port", "1"), {}, "No such option"),
    ):
        run = cli("mcp", *arguments, **variables)
        assert (run.code, run.out) == (2, ""), run.err
        assert why in run.err
        assert "7QX" not in run.err
    (tmp_path / "owl-sap.toml").write_text("")
    assert "no [[collections]]" in cli("mcp").err


def test_nothing_but_the_protocol_on_stdout_and_0_at_the_end(folder: Path) -> None:
    """Lines that are no message do no harm."""
    with piped(folder) as process:
        write(process, b"\n", HELLO, READY, b"no json 7QX\n", b"\xff\xfe\n", LIST)
        assert read(process, 1)["result"]["serverInfo"]["name"] == "owl-sap-connector"
        assert read(process, 2)["result"]["isError"] is False
        write(process, LIST | {"id": 3})
        assert read(process, 3)["result"]["isError"] is False
        assert process.stdin is not None
        process.stdin.close()
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read() == b""
        assert process.wait(10) == 0
        assert b"7QX" not in process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_it_is_told_to(folder: Path, number: signal.Signals) -> None:
    """Also while it waits for the next line."""
    with piped(folder) as process:
        write(process, HELLO, READY, LIST)
        assert read(process, 2)["result"]["isError"] is False
        start = time.monotonic()
        process.send_signal(number)
        assert process.wait(10) == (0 if number == signal.SIGTERM else 130)
        assert time.monotonic() - start < 2
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


def test_collections_are_listed_where_torch_cannot_be_imported(folder: Path) -> None:
    """Only a search by meaning loads the engine."""
    (folder / "blocked").mkdir()
    (folder / "blocked" / "sitecustomize.py").write_text(BLOCK)
    paths = {"PYTHONPATH": os.pathsep.join((str(folder / "blocked"), str(ROOT)))}
    with piped(folder, OWL_SAP_EMBEDDING__MODEL="all-MiniLM-L6-v2", **paths) as process:
        write(process, HELLO, READY, LIST)
        told = read(process, 2)["result"]
        assert told["isError"] is False
        assert told["structuredContent"]["collections"][0]["rows"] == 13
        search = {"name": "search", "arguments": SEARCH | {"mode": "keyword"}}
        write(process, LIST | {"id": 4, "params": search})
        assert read(process, 4)["result"]["isError"] is False


async def test_a_cancelled_request_leaves_the_others_alone(folder: Path) -> None:
    async with Client(command(folder), mode="legacy", cache=None) as client:
        with anyio.move_on_after(0):
            await client.call_tool("search", SEARCH)
        found = await client.call_tool("search", SEARCH)
        assert not found.is_error

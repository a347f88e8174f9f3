"""`owl-sap mcp` as a child process, with the SDK's own client and with a plain pipe."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp.shared.exceptions import MCPError
from typer.testing import CliRunner

from app.src.access.keys import Grant, create, revoke
from app.src.cli import app
from app.src.mcp import stdio
from app.src.service.service import Service
from connector.extras import install_command
from tests.adversity.scene import NAME, Scene
from tests.agents.conftest import offering, rows, said
from tests.api.conftest import TableSource
from tests.forked import owl_sap
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
    service.sync.run("materials")
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
    with owl_sap(
        "mcp", *arguments, cwd=folder, env=environment(**variables), stdin=pipe, stdout=pipe, stderr=pipe
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


@pytest.mark.slow
async def test_tools_for_the_program_that_starts_it(folder: Path) -> None:
    """Who starts it has the operator's rights: he sees every row, and nothing writes. A request that is cancelled
    leaves the others alone."""
    async with Client(command(folder), cache=None) as client:
        with anyio.move_on_after(0):
            await client.call_tool("search", SEARCH)
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
        with pytest.raises(MCPError, match="is refused"):
            await client.list_tools()


@pytest.mark.slow
def test_a_key_that_is_no_good_ends_the_start(folder: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "owl-sap.toml").write_text(TOML)
    create(tmp_path / "keys.json", Grant("embeds", ("embed",)))
    (tmp_path / "wrong").write_text("owl_0000_secret7QX")
    run = cli("mcp", "--key-file", "wrong", OWL_SAP_ACCESS__KEYS="keys.json")
    assert (run.code, run.out) == (2, ""), run.err
    assert "is refused" in run.err
    assert "7QX" not in run.err


def test_what_else_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (name for name in os.environ if name.startswith(("OWL_SAP_", "HANA_"))):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owl-sap.toml").write_text(TOML)
    _, embeds = create(tmp_path / "keys.json", Grant("embeds", ("embed",)))
    (tmp_path / "embeds").write_text(embeds)
    (tmp_path / "wrong").write_text("owl_0000_secret7QX")
    keyed = {"OWL_SAP_ACCESS__KEYS": "keys.json"}

    def why(*arguments: str, **variables: str) -> str:
        run = CliRunner().invoke(app, ["mcp", *arguments], env=variables)
        assert run.exit_code == 2, run.output
        assert (run.stdout, "7QX" in run.stderr) == ("", False)
        return run.stderr

    assert "the file of --key-file cannot be read" in why("--key-file", "absent", **keyed)
    assert "neither access.keys nor access.jwt" in why("--key-file", "wrong")
    assert "needs the scope search" in why("--key-file", "embeds", **keyed)
    assert "is refused" in why(OWL_SAP_MCP__KEY_FILE="wrong", **keyed)
    assert "No such option" in why("--port", "1")
    for missing in ("mcp", "anyio"):
        with monkeypatch.context() as patch:
            for name in list(sys.modules):
                if name == "mcp" or name.startswith(("mcp.", "app.src.mcp.")):
                    patch.delitem(sys.modules, name)
            patch.setitem(sys.modules, missing, None)
            assert " ".join(install_command("mcp").split()) in " ".join(why().split())
    (tmp_path / "owl-sap.toml").write_text("")
    assert "no [[collections]]" in why()


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
        assert process.wait(60) == 0
        assert b"7QX" not in process.stderr.read()


def ends(process: subprocess.Popen[bytes], number: signal.Signals) -> int:
    """The exit code, also while it waits for the next line."""
    start = time.monotonic()
    process.send_signal(number)
    code = process.wait(60)
    assert time.monotonic() - start < 30
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()
    return code


@pytest.mark.slow
def test_it_ends_when_it_is_told_to(folder: Path) -> None:
    with piped(folder) as process:
        write(process, HELLO, READY, LIST)
        assert read(process, 2)["result"]["isError"] is False
        assert ends(process, signal.SIGTERM) == 0


@pytest.mark.slow
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
        assert ends(process, signal.SIGINT) == 130


@pytest.mark.slow
async def test_a_sync_that_was_asked_for_is_done_here(make_scene: Callable[..., Scene]) -> None:
    """With --write and nobody else to do it."""
    scene = make_scene("local", rows=12)
    arguments = ["-m", "app", "mcp", "--write"]
    server = StdioServerParameters(command=sys.executable, args=arguments, cwd=scene.folder, env=scene.variables())
    async with Client(server, cache=None) as client:
        (before,) = (await client.call_tool("sync_status", {})).structured_content["collections"]
        assert (before["state"], before["rows"]) == ("never synced", 0)
        started = await client.call_tool("start_sync", {"collection": NAME})
        assert not started.is_error, said(started)
        with anyio.fail_after(90):
            while True:
                (status,) = (await client.call_tool("sync_status", {"collection": NAME})).structured_content[
                    "collections"
                ]
                if status["job"] is None and status["state"] == "synced":
                    break
                await anyio.sleep(0.1)
        assert status["rows"] == 11, "one is empty"


async def test_a_sender_that_is_too_fast_has_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0

    def endless(descriptor: int, size: int) -> bytes:
        nonlocal reads
        reads += 1
        return b"line\n" * 1000

    monkeypatch.setattr(stdio, "os", SimpleNamespace(read=endless))
    lines = stdio._lines()
    assert await anext(lines) == "line"
    await asyncio.sleep(0.2)
    assert reads <= 7
    monkeypatch.setattr(stdio, "os", SimpleNamespace(read=lambda *_: b""))
    async for _ in lines:  # the thread ends
        pass

"""Bodies with hundreds of thousands of faults: few of them are found and told, whatever the body, and the positions are
right. How long the event loop is busy with them: tests/adversity/test_attacks.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from httpx import Client
from pydantic import BaseModel, ValidationError

from app.src.api import embeddings, generations, jobs, search, tables
from app.src.api.errors import MOST_FAULTS, Refused
from app.src.api.guard import MOST_VALUES, check_values
from app.src.api.requests import MOST_ITEMS, Body
from app.src.service.service import Service
from app.src.settings import Settings
from tests.api.conftest import serving, settings_in

BODIES = [
    each
    for module in (embeddings, generations, jobs, search, tables)
    for each in vars(module).values()
    if isinstance(each, type) and issubclass(each, Body) and each is not Body
]
MANY = MOST_ITEMS
ODD: list[Any] = [{}, [], 1, "", None, True, [[""] * 300] * 300, {str(number): 0 for number in range(300)}]
"""Each of them is a fault in some list."""


def faults(model: type[BaseModel], given: Any) -> list[Any]:
    found: list[Any] = []
    try:
        model.model_validate(given)
    except ValidationError as error:
        found = list(error.errors())
    assert len(found) <= 60 * MOST_FAULTS, "a list in a list may have so many"
    return found


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_no_body_has_more_faults_than_are_told(model: type[BaseModel]) -> None:
    """Also one that is written later: every list in every model, with every kind of item."""
    assert faults(model, {f"x{number}": number for number in range(MANY)})
    for name in model.model_fields:
        for odd in ODD:
            faults(model, {name: [odd] * (MANY if odd in ({}, [], 1, "", None, True) else 500)})


def test_positions_are_right_wherever_the_faults_are() -> None:
    texts: list[Any] = ["a"] * 1000
    texts[3] = texts[777] = texts[778] = texts[999] = 5
    wrong = [
        fault["loc"][-1] for fault in faults(embeddings.EmbedRequest, {"inputs": texts}) if "list[str]" in fault["loc"]
    ]
    assert wrong == [3]
    texts[3] = "a"
    wrong = [fault["loc"][-1] for fault in faults(search.DocumentIds, {"ids": texts})]
    assert wrong == [777], "the first"
    given = {"documents": [{"text": "a"}] * 60 + [{"txt": "a"}]}
    assert [fault["loc"] for fault in faults(search.DocumentsBody, given)] == [
        ("documents", 60, "text"),
        ("documents", 60, "txt"),
    ]


def test_lists_that_are_too_long_are_told_so() -> None:
    assert [fault["type"] for fault in faults(search.DocumentIds, {"ids": ["a"] * (MOST_ITEMS + 1)})] == ["too_long"]
    assert faults(search.SearchRequest, {"vector": [0.5] * MOST_ITEMS}) == []
    assert [fault["loc"] for fault in faults(search.SearchRequest, {"vector": [0.5] * 9 + [""] * 9})] == [("vector", 9)]


# ----------------------------------------------------------------------------------------------------------- the values


@pytest.mark.parametrize("item", ["1", '""', "[]", "{}", '{"a":{"b":[0]}}', '"\\"\\\\"', "-1.5e3", "null"], ids=str)
def test_values_are_counted(item: str) -> None:
    each = json.loads(item)
    inside = len(re.findall(r"[\[{](?![\]}])", item))
    count = MOST_VALUES // (1 + 2 * inside)
    check_values(json.dumps({"input": [each] * (count // 2 - 5)}).encode())
    with pytest.raises(Refused, match="100000 JSON values"):
        check_values(json.dumps({"input": [each] * (MOST_VALUES + 1)}).encode())


def test_text_is_not_counted() -> None:
    """However many commas and brackets it has, and whatever is escaped in it."""
    odd = 'a, b, [c], {d}, "e, f", \\, ' * 10_000
    check_values(json.dumps({"inputs": [odd] * 8}).encode())
    check_values(('{"inputs": "' + ",[{" * MOST_VALUES).encode())  # has no end: the parser says so
    with pytest.raises(Refused):
        check_values(json.dumps({"inputs": [odd, *range(MOST_VALUES)]}).encode())


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_values_are_counted_in_other_encodings(encoding: str) -> None:
    """One of the two bytes of U+2200 is a quotation mark in UTF-8."""
    check_values(json.dumps({"input": [",[{"] * 50}).encode(encoding))
    with pytest.raises(Refused):
        check_values(json.dumps({"\u2200": [0] * (MOST_VALUES + 1)}, ensure_ascii=False).encode(encoding))


def test_members_are_counted() -> None:
    check_values(json.dumps({f"x,{number}": "," for number in range(MOST_VALUES - 1)}).encode())
    with pytest.raises(Refused):
        check_values(json.dumps({f"x{number}": 0 for number in range(MOST_VALUES + 1)}).encode())


# ------------------------------------------------------------------------------------------------------ over the routes


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    document = settings_in(tmp_path_factory.mktemp("faulty")).model_dump(by_alias=True)
    wanted = document["api"] | {"max_body_bytes": 2_000_000}
    settings = Settings.model_validate(document | {"api": wanted, "mcp": {"http": True}})
    with closing(Service(settings)) as service, serving(service) as client:
        yield client


@pytest.mark.parametrize(
    "path", ["/embed", "/v1/embeddings", "/v1/collections/materials/sync", "/v1/collections/materials/search", "/mcp"]
)
@pytest.mark.proves(27)
def test_a_body_of_too_many_values_is_not_parsed(client: Client, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was parsed")

    monkeypatch.setattr("app.src.api.requests.from_json", parsed)
    monkeypatch.setattr(json, "loads", parsed)
    monkeypatch.setattr("app.src.mcp.server.from_json", parsed)
    body = b'{"input": [' + b"{}," * MOST_VALUES + b"{}]}"
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert "100000 JSON values" in answer.text


def test_arguments_that_a_tool_does_not_take(client: Client) -> None:
    arguments = {f"x{number}": 0 for number in range(50_000)}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "search", "arguments": arguments}}
    headers = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-06-18"}
    answer = client.post("/mcp", json=call, headers=headers)
    assert answer.status_code == 200, answer.text[:300]
    assert "50000 arguments" in answer.text
    assert len(answer.content) < 2000

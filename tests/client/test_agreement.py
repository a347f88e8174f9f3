"""The clients and the served description of the API say the same: operations, parameters, bodies, answers."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from app.src.settings import CollectionSettings
from owl_sap_client import AsyncClient, Client, operations
from owl_sap_client.operations import As, Call
from tests.client.conftest import Served

Document = Mapping[str, Any]
OTHER_PROTOCOLS = {"POST /mcp", "POST /v1/rerank"}
"""Agents speak the first, with clients of their own (docs/agents.md); the second is /rerank, for clients of others."""
KEYS = [{"MATNR": "1"}]
EVERYTHING: dict[str, dict[str, Any]] = {
    "search": {
        "collection": "c",
        "query": "q",
        "vector": [1.0],
        "like": "1",
        "k": 3,
        "filter": {"A": 1},
        "mode": "hybrid",
        "min_score": 0.5,
        "mmr_lambda": 0.5,
        "depth": 60,
        "passages": 2,
        "explain": True,
        "rerank": False,
        "group": True,
    },
    "rerank": {"query": "q", "documents": ["a"], "top_n": 1, "return_documents": True, "model": "m"},
    "rows": {"collection": "c", "ids": ["1"]},
    "fields": {"collection": "c"},
    "page": {"collection": "c", "sort": "-A", "filter": {"A": 1}, "after": "x", "limit": 5},
    "map_rows": {"collection": "c", "color": "A", "limit": 5},
    "add_documents": {"collection": "c", "documents": [{"id": "1", "text": "t", "metadata": {}}]},
    "delete_documents": {"collection": "c", "ids": ["1"]},
    "embed": {"texts": ["a"], "input_type": "query", "normalize": False, "truncate": True},
    "openai_embeddings": {
        "texts": ["a"],
        "model": "m",
        "encoding_format": "float",
        "dimensions": 3,
        "input_type": "query",
        "user": "u",
    },
    "models": {},
    "model": {"name": "m"},
    "collections": {},
    "collection": {"name": "c"},
    "create_collection": {"block": dict.fromkeys(CollectionSettings.model_fields)},
    "sync": {"collection": "c", "full": True, "max_deletes": 0.5, "retry_login": True, "accept_schema": True},
    "verify": {"collection": "c", "repair": True, "generation": 2},
    "quarantine": {"collection": "c", "limit": 3},
    "retry_quarantine": {"collection": "c", "keys": KEYS},
    "drop_quarantine": {"collection": "c", "keys": KEYS, "all": True},
    "generations": {"collection": "c"},
    "build_generation": {"collection": "c"},
    "compare_generations": {"collection": "c", "number": 2, "queries": ["q"], "sample": 3},
    "switch_generation": {"collection": "c", "number": 2, "force": True},
    "rollback_generation": {"collection": "c"},
    "drop_generation": {"collection": "c", "number": 2},
    "jobs": {"collection": "c", "state": "failed", "limit": 3},
    "job": {"job": "j"},
    "cancel": {"job": "j"},
    "tables": {"schema": "S", "search": "x", "limit": 3, "offset": 1},
    "table": {"schema": "S", "table": "T", "catalog_only": True},
    "preview": {"schema": "S", "table": "T", "template": "{A}", "samples": 3},
    "info": {},
    "gpu": {},
    "live": {},
    "ready": {},
    "metrics": {},
}
"""Of each method every argument."""


def methods(kind: type) -> dict[str, Any]:
    return {name: each for name, each in vars(kind).items() if hasattr(each, "__wrapped__")}


CALLS: dict[str, Call[Any]] = {
    name: method.__wrapped__(**EVERYTHING[name]) for name, method in methods(Client).items() if name in EVERYTHING
}


@pytest.fixture(scope="module")
def document(served: Served) -> Document:
    found: Document = served.http.get("/openapi.json").json()
    return found


def operation(document: Document, call: Call[Any]) -> Document:
    found: Document = document["paths"][call.path][call.method.lower()]
    return found


def resolved(document: Document, schema: Document) -> Document:
    """A schema, with a reference or an optional one followed."""
    if "$ref" in schema:
        found: Document = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return found
    others = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    return resolved(document, others[0]) if len(others) == 1 else schema


# --------------------------------------------------------------------------------------------------------- operations


def test_both_clients_have_every_operation_under_the_same_signature() -> None:
    ours, others = methods(Client), methods(AsyncClient)
    assert set(ours) == set(others) == set(EVERYTHING)
    for name in ours:
        assert inspect.signature(ours[name]) == inspect.signature(others[name])
        assert ours[name].__wrapped__ is getattr(operations, name)
    by_hand = {"wait", "events", "all_rows", "send"}
    for kind in (Client, AsyncClient):
        public = {name for name in vars(kind) if not name.startswith("_")}
        assert public - set(EVERYTHING) - {"close", "aclose"} == by_hand


def test_everything_says_every_argument() -> None:
    for name, method in methods(Client).items():
        expected: set[str] = set()
        for parameter in inspect.signature(method.__wrapped__, eval_str=True).parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                expected |= set(get_type_hints(get_args(parameter.annotation)[0]))
            else:
                expected.add(parameter.name)
        assert set(EVERYTHING[name]) == expected, name


def test_every_operation_of_the_service_has_a_method_and_none_is_invented(document: Document) -> None:
    served = {f"{method.upper()} {path}" for path, ways in document["paths"].items() for method in ways}
    ours = {f"{call.method} {call.path}" for call in CALLS.values()} | {f"GET {operations.EVENTS}"}
    assert served - OTHER_PROTOCOLS == ours


def test_parameters_agree(document: Document) -> None:
    for name, call in CALLS.items():
        described = operation(document, call)
        parameters = [each for each in described.get("parameters", ()) if each["in"] != "header"]
        in_path = {each["name"] for each in parameters if each["in"] == "path"}
        in_query = {each["name"] for each in parameters if each["in"] == "query"}
        assert (set(call.names), set(call.query)) == (in_path, in_query), name


def test_bodies_agree(document: Document) -> None:
    """Over all methods of an operation, for the actions of generations are several."""
    members: dict[str, set[str]] = defaultdict(set)
    described: dict[str, set[str]] = {}
    for call in CALLS.values():
        found = operation(document, call)
        where = f"{call.method} {call.path}"
        members[where] |= set(call.body or ())
        content = found.get("requestBody", {}).get("content", {}).get("application/json")
        described[where] = set(resolved(document, content["schema"])["properties"]) if content else set()
    assert members == described


# ------------------------------------------------------------------------------------------------------------- answers


def shapes(call: Call[Any], described: Document) -> list[tuple[Any, Document]]:
    """What a method reads, and the schema of what it reads it from."""
    if not isinstance(call.read, As):
        return []
    good = [described["responses"][status] for status in ("200", "201", "202") if status in described["responses"]]
    schemas = [each["content"]["application/json"]["schema"] for each in good if "application/json" in each["content"]]
    return [(call.read, schema) for schema in schemas]


def differences(document: Document, kind: Any, schema: Document) -> list[str]:
    """Of a dataclass and what is inside it against a schema."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(each for each in get_args(kind) if each is not type(None))
    schema = resolved(document, schema)
    if get_origin(kind) is list and dataclasses.is_dataclass(get_args(kind)[0]):
        return differences(document, get_args(kind)[0], schema["items"])
    if not dataclasses.is_dataclass(kind):
        return []
    hints, members = get_type_hints(kind), schema["properties"]
    optional = {each.name for each in dataclasses.fields(kind) if each.default is not dataclasses.MISSING}
    optional |= {each.name for each in dataclasses.fields(kind) if each.default_factory is not dataclasses.MISSING}
    found = [f"{kind}: not read: {name}" for name in members if name not in hints]
    found += [f"{kind}: never told: {name}" for name in hints if name not in members]
    found += [
        f"{kind}: without a default, and may be left out: {name}"
        for name in hints
        if name in members and name not in schema.get("required", ()) and name not in optional
    ]
    for name in set(hints) & set(members):
        found += differences(document, hints[name], members[name])
    return found


def test_answers_agree(document: Document) -> None:
    compared = 0
    for name, call in CALLS.items():
        described = operation(document, call)
        outcomes = []
        for read, schema in shapes(call, described):
            choices = resolved(document, schema).get("anyOf", [schema])  # of generations, by action
            for choice in choices:
                whole = resolved(document, choice)
                inner = choice if read.member is None else whole.get("properties", {}).get(read.member)
                if inner is not None:
                    outcomes.append(differences(document, read.shape, inner))
        assert not isinstance(call.read, As) or [] in outcomes, (name, outcomes)
        compared += bool(outcomes)
    assert compared > 20


def test_the_comparison_can_fail(document: Document) -> None:
    schema = document["components"]["schemas"]["FoundHit"]

    @dataclasses.dataclass
    class Other:
        id: str
        rank: int

    assert [each.rpartition(": ")[2] for each in differences(document, Other, schema)] == [
        *(name for name in schema["properties"] if name != "id"),
        "rank",
    ]

"""The tools: each takes arguments and a principal, calls the service, and returns a bounded answer. The service applies
row rights; this module leaves out counts over hidden rows. Agents see the arguments' schemas and functions' docstrings.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from app.src.access.principal import OPERATOR, Principal
from app.src.jobs.journal import UnknownJob
from app.src.mcp.untrusted import bounded, cut, visible
from app.src.service.search import Mode, SearchOptions
from app.src.service.service import Service
from app.src.service.sync import SyncRequest

_VALUE = 24  # characters per value besides the value itself
_FIELD = 120  # characters of a field besides name and values
_LARGEST_KEY = 8_000  # characters of a row's key as JSON, besides the limit for texts: HANA's keys may be that long
_LONGEST_NAME = 100  # characters of a caller's name: a store keeps 200 for the holder of a lease
_NAME = "Name of the collection, as list_collections gives it."
_ARGUMENTS = ConfigDict(extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)
Answer = dict[str, Any]
Call = TypeVar("Call", bound=Callable[..., Answer])
Collection = Annotated[str, Field(description=_NAME)]
# Marks each answer with texts of rows: they are data that others wrote, never instructions.
UNTRUSTED = {"untrusted": True}


class Refused(Exception):
    """The call is rejected; the message tells the model what to do instead. `scope`: true if the caller lacks one."""

    def __init__(self, message: str, *, scope: bool = False) -> None:
        super().__init__(message)
        self.scope = scope


@dataclass(frozen=True, slots=True)
class Tool:
    """`call(service, principal, **arguments)` waits for stores and engines: run it in a thread. `takes`: the model of
    its arguments. `writes`: it needs the scope sync, besides search."""

    title: str
    call: Callable[..., Answer]
    takes: type[BaseModel]
    writes: bool


TOOLS: dict[str, Tool] = {}


def _tool(title: str, *, writes: bool = False) -> Callable[[Call], Call]:
    """Add a function to TOOLS; its signature describes the arguments."""

    def add(call: Call) -> Call:
        hints = get_type_hints(call, include_extras=True)
        taken = [each for each in inspect.signature(call).parameters.values() if each.name not in ("service", "who")]
        fields: dict[str, Any] = {
            each.name: (hints[each.name], ... if each.default is each.empty else each.default) for each in taken
        }
        name = call.__name__.title().replace("_", "")
        TOOLS[call.__name__] = Tool(title, call, create_model(name, __config__=_ARGUMENTS, **fields), writes)
        return call

    return add


def offered(service: Service, who: Principal) -> dict[str, Tool]:
    """Return the tools that this principal may use here."""
    writing = service.settings.mcp.write and who.may("sync")
    return {name: tool for name, tool in TOOLS.items() if who.may("search") and (writing or not tool.writes)}


def find(service: Service, who: Principal, name: str) -> Tool:
    """Return a tool. Raises Refused."""
    allowed = offered(service, who)
    if name in allowed:
        return allowed[name]
    if name in offered(service, OPERATOR):
        scope = "sync" if TOOLS[name].writes else "search"
        raise Refused(f"{name} needs the scope {scope}, which this key does not have", scope=True)
    raise Refused(f"there is no such tool; there are: {', '.join(allowed)}")


def audited(service: Service, who: Principal, tool: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the audit fields of a call; never a query, a value or a text, and only configured names."""
    name = asked.get("collection")
    if name not in service.collections.names:
        return {}
    told: dict[str, Any] = {"collection": name}
    if tool in ("search", "get_row", "describe_collection"):
        told["rows"] = service.rights.extent(name, who)
    if tool == "search":
        shape = service.rights.filter_shape(name, asked["filter"])
        told |= {"filter": shape, "mode": asked["mode"], "k": asked["k"]}
    if tool == "get_row":
        told |= {"asked": 1, "hits": 0}  # until the row is found
    return told


@_tool("Search rows")
def search(  # noqa: PLR0913 (the tool's arguments)
    service: Service,
    who: Principal,
    collection: Collection,
    query: Annotated[
        str,
        Field(
            min_length=1,
            description="What to look for, in words that the rows may use: a sentence or keywords, in their language. "
            "Numbers and codes are found by modes keyword and hybrid.",
            examples=["noise from the gearbox", "4711-A"],
        ),
    ],
    k: Annotated[int, Field(ge=1, description="How many rows at most.")] = 10,
    filter: Annotated[
        dict[str, Any] | None,
        Field(
            description="Only rows whose fields fit. The fields are those that list_collections names, their values "
            'those that describe_collection shows. {"MTART": "FERT"}, {"PRICE": {"$gte": 10, "$lt": 20}}, '
            '{"MATKL": {"$in": ["001", "002"]}}; also $eq $ne $lte $gt $nin $between $like $contains $and $or.',
            examples=[{"MTART": "FERT"}],
        ),
    ] = None,
    mode: Annotated[
        Mode,
        Field(
            description="hybrid: by meaning and by words, the best choice; vector: by meaning alone; keyword: rows "
            "that hold the words, for numbers, codes and names."
        ),
    ] = "hybrid",
) -> Answer:
    """Finds the rows of a collection that fit a question, best first, by meaning and by words. Each hit has the
    row's key in SAP HANA, its text and its metadata. Call list_collections first when you do not know the
    collections. Few or no good hits: say it in other words, in the language of the rows, or drop the filter. Scores
    only order the hits of one answer; relevance is from 0 to 1, and below 0.2 a hit is probably not an answer."""
    most, longest = service.settings.mcp.max_hits, service.settings.api.max_text_chars
    if k > most:
        raise Refused(f"k is {k}; at most {most} rows are given at once: narrow the search instead")
    if len(query) > longest:
        raise Refused(f"query has {len(query)} characters; at most {longest}")
    options = SearchOptions(mode)
    try:
        found = service.search.run(collection, query, k, filter, options, principal=who)
    except ValueError as error:
        raise Refused(str(error)) from error
    shown: list[Answer] = []
    # One limit for all hits together: the next hits may use what one does not need.
    left, keys = service.settings.mcp.max_chars, service.settings.mcp.max_chars + _LARGEST_KEY
    for place, hit in enumerate(found.hits):
        keys -= len(hit.id) + len(json.dumps(hit.key, default=str))
        if keys < 0 and shown:
            break
        share = left // (len(found.hits) - place)
        metadata, size, missing = bounded(hit.metadata, share // 2)
        text, short = cut(hit.text, share - size)
        left -= size + len(text)
        about = {"id": hit.id, "key": visible(hit.key), "score": hit.score, "relevance": hit.relevance}
        shown.append(about | {"text": text, "metadata": metadata, "cut": missing or short})
    return UNTRUSTED | {
        "collection": collection,
        "hits": shown,
        "left_out": len(found.hits) - len(shown),
        "notes": found.notes,
        "stale_since": found.stale_since,
    }


@_tool("Read one row")
def get_row(
    service: Service,
    who: Principal,
    collection: Collection,
    id: Annotated[str, Field(min_length=1, description="Of a row, exactly as search gave it.")],
    offset: Annotated[
        int, Field(ge=0, description="Character of the text to begin at: next_offset of the answer before.")
    ] = 0,
) -> Answer:
    """The whole text of one row, with its key and metadata, by the id that search gave. Long texts come in parts:
    ask again with offset = next_offset while there is one."""
    rows = service.browse.rows(collection, [id], principal=who)
    if not rows:  # or hidden from the caller
        raise Refused(f'no row of "{collection}" has this id; ids are those that search gives, whole and unchanged')
    row, most = rows[0], service.settings.mcp.max_chars
    if offset > len(row.text):
        raise Refused(f"offset is {offset}; the text has {len(row.text)} characters")
    metadata, size, missing = bounded(row.metadata, most // 2)
    end = offset + most - size
    return UNTRUSTED | {
        "collection": collection,
        "id": row.id,
        "key": visible(row.key),
        "text": visible(row.text[offset:end]),
        "metadata": metadata,
        "characters": len(row.text),
        "next_offset": end if end < len(row.text) else None,
        "cut": missing,
    }


@_tool("Fields of a collection")
def describe_collection(service: Service, who: Principal, collection: Collection) -> Answer:
    """What a filter on a collection can be made of: its fields with their types, most frequent values, smallest and
    largest. Ask before you write a filter whose values you do not know."""
    found = service.browse.fields(collection, principal=who)
    left = service.settings.mcp.max_chars
    shown: list[Answer] = []
    for field in found.fields:
        left -= len(field.name) + len(str(field.min)) + len(str(field.max)) + _FIELD
        if left < 0 and shown:
            break
        values = []
        for each in field.values:
            left -= len(str(each.value)) + _VALUE
            if left >= 0:
                values.append({"value": visible(each.value), "count": each.count})
        about = {"name": field.name, "type": field.type, "values": values}
        more = field.more or len(values) < len(field.values)
        shown.append(about | {"more": more, "min": visible(field.min), "max": visible(field.max)})
    return UNTRUSTED | {
        "collection": collection,
        "description": service.collections.block(collection).description,
        "rows": found.rows,
        "sampled": found.sampled,
        "fields": shown,
        "left_out": len(found.fields) - len(shown),
    }


@_tool("List collections")
def list_collections(service: Service, who: Principal) -> Answer:
    """The collections that can be searched: what each holds, the fields that a filter can name, how many rows, and
    how fresh they are. Begin here."""
    from connector.document.document import metadata_names

    listed = []
    for status in service.status.collections():
        block = service.collections.block(status["collection"])
        listed.append(
            _freshness(service, who, status)
            | {
                "description": block.description,
                "source": block.source or None,
                "key": list(status["key"] or block.key),
                "fields": list(metadata_names(block.metadata).values()),
            }
        )
    return {"collections": listed}


@_tool("How fresh is it?")
def sync_status(
    service: Service,
    who: Principal,
    collection: Annotated[str | None, Field(description=f"{_NAME} Null: all of them.")] = None,
) -> Answer:
    """How fresh a collection is (null: all of them): when rows were last taken over from SAP HANA, how far behind
    it is, and what is at work on it now."""
    listed = []
    for status in service.status.collections(None if collection is None else [collection]):
        fresh = _freshness(service, who, status)
        all_rows, job = fresh["rows"] is not None, None
        try:
            record = None if status["job"] is None else service.jobs.get(status["job"])
        except UnknownJob:  # the job has ended, and its record is deleted
            record = None
        if record is not None:
            job = {
                "id": record.id,
                "kind": record.kind,
                "state": record.state,
                "progress": dict(record.progress) if all_rows else {},  # progress counts rows of all owners
                "error": record.error if who.may("sync") else None,
            }
        listed.append(fresh | {"quarantined": status["quarantined"] if all_rows else None, "job": job})
    return {"collections": listed}


def _freshness(service: Service, who: Principal, status: Mapping[str, Any]) -> Answer:
    same = ("collection", "last_sync", "lag_seconds", "next_sync", "stale_since")
    state = "never synced" if status["model"] is None else "synced"
    return {name: status[name] for name in same} | {
        "state": "written by clients" if status["method"] == "documents" else state,
        "rows": status["rows"] if service.rights.visible(status["collection"], who) is None else None,
    }


@_tool("Bring a collection up to date", writes=True)
def start_sync(
    service: Service,
    who: Principal,
    collection: Collection,
    full: Annotated[
        bool, Field(description="Compare every row, not only those that changed as far as is known.")
    ] = False,
) -> Answer:
    """Starts to bring a collection up to date with SAP HANA, in the background: rows that changed are embedded
    again, rows that are gone leave the collection. SAP HANA's own rows stay as they are. It can take minutes and
    keeps the machine busy, so only when a user asks for it; sync_status tells how it fares."""
    request = SyncRequest(full, owner=f"agent-{who.name[:_LONGEST_NAME]}")
    job = service.background.start_sync(collection, request)
    return {"collection": collection, "job": job.id}

"""The tools: each takes arguments and a principal, calls the service, and returns a bounded answer. The service applies
row rights; counts over hidden rows are left out here. Agents get the arguments' schemas and the methods' docstrings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field

from app.src.access.principal import Principal
from app.src.access.rows import Nothing
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


class Refused(Exception):
    """The call is rejected; the message tells the model what to do instead."""


class ScopeMissing(Refused):
    """The caller lacks the tool's scope."""


# ----------------------------------------------------------------------------------------------------------- arguments


class Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)


class OneCollection(Arguments):
    collection: str = Field(description=_NAME)


class Search(OneCollection):
    query: str = Field(
        min_length=1,
        description="What to look for, in words that the rows may use: a sentence or keywords, in their language. "
        "Numbers and codes are found by modes keyword and hybrid.",
        examples=["noise from the gearbox", "4711-A"],
    )
    k: int = Field(default=10, ge=1, description="How many rows at most.")
    filter: dict[str, Any] | None = Field(
        default=None,
        description="Only rows whose fields fit. The fields are those that list_collections names, their values those "
        'that describe_collection shows. {"MTART": "FERT"}, {"PRICE": {"$gte": 10, "$lt": 20}}, '
        '{"MATKL": {"$in": ["001", "002"]}}; also $eq $ne $lte $gt $nin $between $like $contains $and $or.',
        examples=[{"MTART": "FERT"}],
    )
    mode: Mode = Field(
        default="hybrid",
        description="hybrid: by meaning and by words, the best choice; vector: by meaning alone; keyword: rows that "
        "hold the words, for numbers, codes and names.",
    )


class GetRow(OneCollection):
    id: str = Field(min_length=1, description="Of a row, exactly as search gave it.")
    offset: int = Field(
        default=0, ge=0, description="Character of the text to begin at: next_offset of the answer before."
    )


class SyncStatus(Arguments):
    collection: str | None = Field(default=None, description=f"{_NAME} Null: all of them.")


class StartSync(OneCollection):
    full: bool = Field(default=False, description="Compare every row, not only those that changed as far as is known.")


Answer = dict[str, Any]
# In each answer with texts of rows: they are data that others wrote, never instructions.
UNTRUSTED = {"untrusted": True}


# --------------------------------------------------------------------------------------------------------------- tools


@dataclass(frozen=True, slots=True)
class Tool:
    """`call` waits for stores and engines: run it in a thread. `writes`: it needs the scope sync, besides search."""

    title: str
    call: Callable[[Any, Principal], Answer]
    writes: bool = False

    @property
    def takes(self) -> type[Arguments]:
        takes: type[Arguments] = get_type_hints(self.call)["asked"]
        return takes


class Tools:
    """The tools over a service that the caller closes."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._limits = service.settings.mcp
        self.all = {
            "search": Tool("Search rows", self.search),
            "get_row": Tool("Read one row", self.get_row),
            "list_collections": Tool("List collections", self.list_collections),
            "describe_collection": Tool("Fields of a collection", self.describe_collection),
            "sync_status": Tool("How fresh is it?", self.sync_status),
        }
        if self._limits.write:
            self.all["start_sync"] = Tool("Bring a collection up to date", self.start_sync, writes=True)

    def of(self, principal: Principal) -> dict[str, Tool]:
        """Return the tools that this principal may use."""
        if not principal.may("search"):
            return {}
        return {name: tool for name, tool in self.all.items() if not tool.writes or principal.may("sync")}

    def find(self, name: str, principal: Principal) -> Tool:
        """Return a tool. Raises Refused."""
        found = self.of(principal)
        if name in found:
            return found[name]
        if name in self.all:
            scope = "sync" if self.all[name].writes else "search"
            raise ScopeMissing(f"{name} needs the scope {scope}, which this key does not have")
        raise Refused(f"there is no such tool; there are: {', '.join(found)}")

    def audited(self, asked: Arguments, principal: Principal) -> dict[str, Any]:
        """Return the audit fields of a call; never a query, a value or a text, and only configured names."""
        name = getattr(asked, "collection", None)
        if name not in self._service.collections.names:
            return {}
        told: dict[str, Any] = {"collection": name}
        if not isinstance(asked, SyncStatus | StartSync):
            within = self._service.rights.visible(name, principal)
            told["rows"] = "all" if within is None else "none" if isinstance(within, Nothing) else "some"
        if isinstance(asked, Search):
            shape = self._service.rights.filter_shape(name, asked.filter)
            told |= {"filter": shape, "mode": asked.mode, "k": asked.k}
        if isinstance(asked, GetRow):
            told |= {"asked": 1, "hits": 0}  # until the row is found
        return told

    def search(self, asked: Search, principal: Principal) -> Answer:
        """Finds the rows of a collection that fit a question, best first, by meaning and by words. Each hit has the
        row's key in SAP HANA, its text and its metadata. Call list_collections first when you do not know the
        collections. Few or no good hits: say it in other words, in the language of the rows, or drop the filter. Scores
        only order the hits of one answer; the nearest row is not always a right one."""
        most, longest = self._limits.max_hits, self._service.settings.api.max_text_chars
        if asked.k > most:
            raise Refused(f"k is {asked.k}; at most {most} rows are given at once: narrow the search instead")
        if len(asked.query) > longest:
            raise Refused(f"query has {len(asked.query)} characters; at most {longest}")
        options = SearchOptions(asked.mode)
        try:
            found = self._service.search.run(
                asked.collection, asked.query, asked.k, asked.filter, options, principal=principal
            )
        except ValueError as error:
            raise Refused(str(error)) from error
        shown: list[Answer] = []
        # One limit for all hits together: what one does not need is for the next.
        left, keys = self._limits.max_chars, self._limits.max_chars + _LARGEST_KEY
        for place, hit in enumerate(found.hits):
            keys -= len(hit.id) + len(json.dumps(hit.key, default=str))
            if keys < 0 and shown:
                break
            share = left // (len(found.hits) - place)
            metadata, size, missing = bounded(hit.metadata, share // 2)
            text, short = cut(hit.text, share - size)
            left -= size + len(text)
            about = {"id": hit.id, "key": _visible(hit.key), "score": hit.score}
            shown.append(about | {"text": text, "metadata": metadata, "cut": missing or short})
        return UNTRUSTED | {
            "collection": asked.collection,
            "hits": shown,
            "left_out": len(found.hits) - len(shown),
            "notes": found.notes,
            "stale_since": found.stale_since,
        }

    def get_row(self, asked: GetRow, principal: Principal) -> Answer:
        """The whole text of one row, with its key and metadata, by the id that search gave. Long texts come in parts:
        ask again with offset = next_offset while there is one."""
        rows = self._service.browse.rows(asked.collection, [asked.id], principal=principal)
        if not rows:  # or hidden from the caller
            raise Refused(
                f'no row of "{asked.collection}" has this id; ids are those that search gives, whole and unchanged'
            )
        row, most = rows[0], self._limits.max_chars
        if asked.offset > len(row.text):
            raise Refused(f"offset is {asked.offset}; the text has {len(row.text)} characters")
        metadata, size, missing = bounded(row.metadata, most // 2)
        end = asked.offset + most - size
        return UNTRUSTED | {
            "collection": asked.collection,
            "id": row.id,
            "key": _visible(row.key),
            "text": visible(row.text[asked.offset : end]),
            "metadata": metadata,
            "characters": len(row.text),
            "next_offset": end if end < len(row.text) else None,
            "cut": missing,
        }

    def describe_collection(self, asked: OneCollection, principal: Principal) -> Answer:
        """What a filter on a collection can be made of: its fields with their types, most frequent values, smallest and
        largest. Ask before you write a filter whose values you do not know."""
        block = next((each for each in self._service.settings.collections if each.name == asked.collection), None)
        found = self._service.browse.fields(asked.collection, principal=principal)
        left = self._limits.max_chars
        shown: list[Answer] = []
        for field in found.fields:
            left -= len(field.name) + len(str(field.min)) + len(str(field.max)) + _FIELD
            if left < 0 and shown:
                break
            values = []
            for each in field.values:
                left -= len(str(each.value)) + _VALUE
                if left >= 0:
                    values.append({"value": _visible(each.value), "count": each.count})
            about = {"name": field.name, "type": field.type, "values": values}
            more = field.more or len(values) < len(field.values)
            shown.append(about | {"more": more, "min": _visible(field.min), "max": _visible(field.max)})
        return UNTRUSTED | {
            "collection": asked.collection,
            "description": None if block is None else block.description,
            "rows": found.rows,
            "sampled": found.sampled,
            "fields": shown,
            "left_out": len(found.fields) - len(shown),
        }

    def list_collections(self, asked: Arguments, principal: Principal) -> Answer:
        """The collections that can be searched: what each holds, the fields that a filter can name, how many rows, and
        how fresh they are. Begin here."""
        from connector.document.document import metadata_names

        blocks = {block.name: block for block in self._service.settings.collections}
        listed = []
        for status in self._service.status.collections():
            block = blocks[status["collection"]]
            listed.append(
                self._freshness(status, principal)
                | {
                    "description": block.description,
                    "source": block.source or None,
                    "key": list(status["key"] or block.key),
                    "fields": list(metadata_names(block.metadata).values()),
                }
            )
        return {"collections": listed}

    def sync_status(self, asked: SyncStatus, principal: Principal) -> Answer:
        """How fresh a collection is (null: all of them): when rows were last taken over from SAP HANA, how far behind
        it is, and what is at work on it now."""
        listed = []
        for status in self._service.status.collections(None if asked.collection is None else [asked.collection]):
            fresh = self._freshness(status, principal)
            all_rows, job = fresh["rows"] is not None, None
            try:
                record = None if status["job"] is None else self._service.jobs.get(status["job"])
            except UnknownJob:  # it has ended, and its record is deleted
                record = None
            if record is not None:
                job = {
                    "id": record.id,
                    "kind": record.kind,
                    "state": record.state,
                    "progress": dict(record.progress) if all_rows else {},  # it counts rows of all owners
                    "error": record.error if principal.may("sync") else None,
                }
            listed.append(fresh | {"quarantined": status["quarantined"] if all_rows else None, "job": job})
        return {"collections": listed}

    def _freshness(self, status: Mapping[str, Any], principal: Principal) -> Answer:
        same = ("collection", "last_sync", "lag_seconds", "next_sync", "stale_since")
        state = "never synced" if status["model"] is None else "synced"
        return {name: status[name] for name in same} | {
            "state": "written by clients" if status["method"] == "documents" else state,
            "rows": status["rows"] if self._service.rights.visible(status["collection"], principal) is None else None,
        }

    def start_sync(self, asked: StartSync, principal: Principal) -> Answer:
        """Starts to bring a collection up to date with SAP HANA, in the background: rows that changed are embedded
        again, rows that are gone leave the collection. SAP HANA's own rows stay as they are. It can take minutes and
        keeps the machine busy, so only when a user asks for it; sync_status tells how it fares."""
        request = SyncRequest(asked.full, owner=f"agent-{principal.name[:_LONGEST_NAME]}")
        job = self._service.background.start_sync(asked.collection, request)
        return {"collection": asked.collection, "job": job.id}


def _visible(value: Any) -> Any:
    """Return a value, or each value of a key, without invisible characters."""
    if isinstance(value, Mapping):
        return {name: _visible(each) for name, each in value.items()}
    return visible(value) if isinstance(value, str) else value

"""The tools: each takes arguments and a principal, calls the service, and returns a bounded answer. The service applies
row rights; counts over hidden rows are left out here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from app.src.access.principal import Principal
from app.src.access.principal import Scope as Right
from app.src.access.rows import Nothing as Unseen
from app.src.jobs import UnknownJob
from app.src.mcp import answers
from app.src.mcp.answers import Answer, Arguments
from app.src.mcp.untrusted import bounded, cut, visible
from app.src.service.search import SearchOptions
from app.src.service.service import Service
from app.src.service.sync import SyncRequest

_VALUE = 24  # characters per value besides the value itself
_FIELD = 120  # characters of a field besides name and values
_LARGEST_KEY = 8_000  # characters of a row's key as JSON, besides the limit for texts: HANA's keys may be that long
_LONGEST_NAME = 100  # characters of a caller's name: a store keeps 200 for the holder of a lease


class Refused(Exception):
    """The call is rejected; the message tells the model what to do instead."""


class ScopeMissing(Refused):
    """The caller lacks the tool's scope."""


@dataclass(frozen=True, slots=True)
class Tool:
    """`call` waits for stores and engines: run it in a thread. `needs`: the scope besides search."""

    name: str
    title: str
    description: str
    takes: type[Arguments]
    gives: type[Answer]
    call: Callable[[Any, Principal], Answer]
    writes: bool = False
    needs: Right = "search"


class Tools:
    """The tools over a service that the caller closes."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._limits = service.settings.mcp
        tools = [*self._reading(), self._start()] if self._limits.write else self._reading()
        self._all = {tool.name: tool for tool in tools}

    def knows(self, name: str) -> bool:
        return name in self._all

    def of(self, principal: Principal) -> list[Tool]:
        """Return the tools that this principal may use."""
        return [tool for tool in self._all.values() if principal.may("search") and principal.may(tool.needs)]

    def find(self, name: str, principal: Principal) -> Tool:
        """Return a tool. Raises Refused."""
        found = {tool.name: tool for tool in self.of(principal)}
        if name in found:
            return found[name]
        if name in self._all:
            raise ScopeMissing(f"{name} needs the scope {self._all[name].needs}, which this key does not have")
        raise Refused(f"there is no such tool; there are: {', '.join(found)}")

    def audited(self, asked: Arguments, principal: Principal) -> dict[str, Any]:
        """Return the audit fields of a call; never a query, a value or a text, and only configured names."""
        name = getattr(asked, "collection", None)
        if name not in self._service.collections.names:
            return {}
        told: dict[str, Any] = {"collection": name}
        if isinstance(asked, answers.OneCollection) and not isinstance(asked, answers.StartSync):
            within = self._service.rights.visible(name, principal)
            told["rows"] = "all" if within is None else "none" if isinstance(within, Unseen) else "some"
        if isinstance(asked, answers.Search):
            shape = self._service.rights.filter_shape(name, asked.filter)
            told |= {"filter": shape, "mode": asked.mode, "k": asked.k}
        if isinstance(asked, answers.GetRow):
            told |= {"asked": 1, "hits": 0}  # until the row is found
        return told

    def counted(self, answer: Answer) -> dict[str, int]:
        """Return the audit fields of an answer, with REST's counts."""
        if isinstance(answer, answers.Hits):
            return {"hits": len(answer.hits)}
        if isinstance(answer, answers.Described):
            return {"hits": answer.sampled}
        return {"hits": 1} if isinstance(answer, answers.FoundRow) else {}

    def _reading(self) -> list[Tool]:
        return [
            Tool(
                "search",
                "Search rows",
                "Finds the rows of a collection that fit a question, best first, by meaning and by words. Each hit has "
                "the row's key in SAP HANA, its text and its metadata. Call list_collections first when you do not "
                "know the collections. Few or no good hits: say it in other words, in the language of the rows, or "
                "drop the filter. Scores only order the hits of one answer; the nearest row is not always a right "
                f"one. At most {self._limits.max_hits} rows.",
                answers.Search,
                answers.Hits,
                self.search,
            ),
            Tool(
                "get_row",
                "Read one row",
                "The whole text of one row, with its key and metadata, by the id that search gave. Long texts come in "
                "parts: ask again with offset = next_offset while there is one.",
                answers.GetRow,
                answers.FoundRow,
                self.get_row,
            ),
            Tool(
                "list_collections",
                "List collections",
                "The collections that can be searched: what each holds, the fields that a filter can name, how many "
                "rows, and how fresh they are. Begin here.",
                answers.Arguments,
                answers.Collections,
                self.list_collections,
            ),
            Tool(
                "describe_collection",
                "Fields of a collection",
                "What a filter on a collection can be made of: its fields with their types, most frequent values, "
                "smallest and largest. Ask before you write a filter whose values you do not know.",
                answers.OneCollection,
                answers.Described,
                self.describe_collection,
            ),
            Tool(
                "sync_status",
                "How fresh is it?",
                "How fresh a collection is (null: all of them): when rows were last taken over from SAP HANA, how far "
                "behind it is, and what is at work on it now.",
                answers.SyncStatus,
                answers.Statuses,
                self.sync_status,
            ),
        ]

    def _start(self) -> Tool:
        return Tool(
            "start_sync",
            "Bring a collection up to date",
            "Starts to bring a collection up to date with SAP HANA, in the background: rows that changed are embedded "
            "again, rows that are gone leave the collection. SAP HANA's own rows stay as they are. It can take minutes "
            "and keeps the machine busy, so only when somebody asks for it; sync_status tells how it fares.",
            answers.StartSync,
            answers.Started,
            self.start_sync,
            writes=True,
            needs="sync",
        )

    def search(self, asked: answers.Search, principal: Principal) -> answers.Hits:
        """Shows hits within the bound for all of them together; what one does not need is the next one's."""
        most, longest = self._limits.max_hits, self._service.settings.api.max_text_chars
        if asked.k > most:
            raise Refused(f"k is {asked.k}; at most {most} rows are given at once: narrow the search instead")
        if len(asked.query) > longest:
            raise Refused(f"query has {len(asked.query)} characters; at most {longest}")
        try:
            found = self._service.search.run(
                asked.collection, asked.query, asked.k, asked.filter, SearchOptions(asked.mode), principal=principal
            )
        except ValueError as error:
            raise Refused(str(error)) from error
        shown: list[answers.Hit] = []
        left, keys = self._limits.max_chars, self._limits.max_chars + _LARGEST_KEY
        for place, hit in enumerate(found.hits):
            keys -= len(hit.id) + len(json.dumps(hit.key, default=str))
            if keys < 0 and shown:
                break
            share = left // (len(found.hits) - place)
            metadata, size, missing = bounded(hit.metadata, share // 2)
            text, short = cut(hit.text, share - size)
            left -= size + len(text)
            key = _visible_key(hit.key)
            shown.append(
                answers.Hit(id=hit.id, key=key, score=hit.score, text=text, metadata=metadata, cut=missing or short)
            )
        return answers.Hits(
            collection=asked.collection,
            hits=shown,
            left_out=len(found.hits) - len(shown),
            notes=found.notes,
            stale_since=found.stale_since,
        )

    def get_row(self, asked: answers.GetRow, principal: Principal) -> answers.FoundRow:
        """A row that may not be seen is one that is not there."""
        rows = self._service.browse.rows(asked.collection, [asked.id], principal=principal)
        if not rows:
            raise Refused(
                f'no row of "{asked.collection}" has this id; ids are those that search gives, whole and unchanged'
            )
        row, most = rows[0], self._limits.max_chars
        if asked.offset > len(row.text):
            raise Refused(f"offset is {asked.offset}; the text has {len(row.text)} characters")
        metadata, size, missing = bounded(row.metadata, most // 2)
        end = asked.offset + most - size
        return answers.FoundRow(
            collection=asked.collection,
            id=row.id,
            key=_visible_key(row.key),
            text=visible(row.text[asked.offset : end]),
            metadata=metadata,
            characters=len(row.text),
            next_offset=end if end < len(row.text) else None,
            cut=missing,
        )

    def describe_collection(self, asked: answers.OneCollection, principal: Principal) -> answers.Described:
        block = next((each for each in self._service.settings.collections if each.name == asked.collection), None)
        found = self._service.browse.fields(asked.collection, principal=principal)
        left = self._limits.max_chars
        shown: list[answers.Filterable] = []
        for field_ in found.fields:
            left -= len(field_.name) + len(str(field_.min)) + len(str(field_.max)) + _FIELD
            if left < 0 and shown:
                break
            values = []
            for each in field_.values:
                left -= len(str(each.value)) + _VALUE
                if left >= 0:
                    values.append(answers.Value(value=_visible(each.value), count=each.count))
            shown.append(
                answers.Filterable(
                    name=field_.name,
                    type=field_.type,
                    values=values,
                    more=field_.more or len(values) < len(field_.values),
                    min=_visible(field_.min),
                    max=_visible(field_.max),
                )
            )
        return answers.Described(
            collection=asked.collection,
            description=None if block is None else block.description,
            rows=found.rows,
            sampled=found.sampled,
            fields=shown,
            left_out=len(found.fields) - len(shown),
        )

    def list_collections(self, asked: answers.Arguments, principal: Principal) -> answers.Collections:
        from connector.document.document import metadata_names

        blocks = {block.name: block for block in self._service.settings.collections}
        listed = []
        for status in self._service.status.collections():
            block = blocks[status["collection"]]
            listed.append(
                answers.Collection(
                    **self._freshness(status, principal),
                    description=block.description,
                    source=block.source or None,
                    key=list(status["key"] or block.key),
                    fields=list(metadata_names(block.metadata).values()),
                )
            )
        return answers.Collections(collections=listed)

    def sync_status(self, asked: answers.SyncStatus, principal: Principal) -> answers.Statuses:
        told = self._service.status.collections(None if asked.collection is None else [asked.collection])
        return answers.Statuses(
            collections=[
                answers.Status(
                    **self._freshness(status, principal),
                    quarantined=status["quarantined"] if self._sees_all(status, principal) else None,
                    job=self._job(status, principal),
                )
                for status in told
            ]
        )

    def _freshness(self, status: Mapping[str, Any], principal: Principal) -> dict[str, Any]:
        same = ("collection", "last_sync", "lag_seconds", "next_sync", "stale_since")
        state = "never synced" if status["model"] is None else "synced"
        return {name: status[name] for name in same} | {
            "state": "written by clients" if status["method"] == "documents" else state,
            "rows": status["rows"] if self._sees_all(status, principal) else None,
        }

    def _sees_all(self, status: Mapping[str, Any], principal: Principal) -> bool:
        return self._service.rights.visible(status["collection"], principal) is None

    def _job(self, status: Mapping[str, Any], principal: Principal) -> answers.Job | None:
        """Return the running job without its progress, which counts rows of all owners."""
        if status["job"] is None:
            return None
        try:
            record = self._service.jobs.get(status["job"])
        except UnknownJob:  # it has ended, and its record is deleted
            return None
        return answers.Job(
            id=record.id,
            kind=record.kind,
            state=record.state,
            progress=dict(record.progress) if self._sees_all(status, principal) else {},
            error=record.error if principal.may("sync") else None,
        )

    def start_sync(self, asked: answers.StartSync, principal: Principal) -> answers.Started:
        request = SyncRequest(asked.full, owner=f"agent-{principal.name[:_LONGEST_NAME]}")
        return answers.Started(
            collection=asked.collection, job=self._service.background.start_sync(asked.collection, request).id
        )


def _visible_key(key: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _visible(value) for name, value in key.items()}


def _visible(value: Any) -> Any:
    return visible(value) if isinstance(value, str) else value

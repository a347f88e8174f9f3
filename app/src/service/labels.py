"""Labels of a collection's fields and texts of their values, read from HANA in the background and cached."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from app.src.access.principal import Principal
from app.src.access.rows import Nothing, Rights
from app.src.service.browse import NUMBERS, SAMPLE
from app.src.service.collections import Collections, VisibleView
from app.src.service.wiring import Parts
from connector.document.document import metadata_names
from connector.document.values import is_dats, is_tims
from connector.errors import ConnectorError
from connector.model import CollectionSpec, CollectionStatus, Column, Filter, StoredText, Table

MOST_VALUES = 200  # texts of one field
_LONGEST_CODE = 40
_LONGEST_LABEL = 60
_KEPT = 300.0  # seconds
_KEPT_FAILED = 60.0
_WAIT = 1.5  # seconds that a request waits for HANA; then it gets what was known before
_MOST_KEPT = 200

FieldKind = Literal["text", "number", "date", "time", "boolean"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LabelledField:
    """A key column or a metadata field. `label`: HANA's comment, else the name. `values`: texts by code, of codes in
    rows that the caller may see."""

    name: str
    label: str
    type: FieldKind
    values: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Look:
    """One reading, in a thread of its own, because HANA may hang."""

    result: Any
    begun: float
    until: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)


class Labels:
    """Thread-safe. Without HANA, or without the right to read a table, names and codes stay as they are."""

    def __init__(self, parts: Parts, collections: Collections, rights: Rights) -> None:
        self._parts = parts
        self._collections = collections
        self._rights = rights
        self._lock = threading.Lock()
        self._looks: dict[tuple[str, str], _Look] = {}

    def fields(self, name: str, key: Sequence[str], *, principal: Principal) -> list[LabelledField]:
        """Return the key columns (`key`, or the configured ones), then the metadata fields; [] for a collection that
        clients write. Raises UnknownCollection."""
        spec = self._collections.spec(name)
        if spec.written_by_clients:
            return []
        nothing: dict[str, tuple[str, FieldKind]] = {}
        known = self._look((name, ""), lambda: self._columns(spec), nothing)
        names = {column: column for column in key or spec.key} | metadata_names(spec.metadata)
        texts: dict[str, dict[str, str]] = {}
        if principal.may("search"):
            within = self._rights.visible(name, principal)
            whose = (name, json.dumps(within, sort_keys=True, default=str))
            texts = self._look(whose, lambda: self._values(spec, within), texts)
        fields = []
        for column, shown in names.items():
            label, kind = known.get(column, (shown, "text"))
            fields.append(LabelledField(shown, label, kind, texts.get(column, {})))
        return fields

    def _columns(self, spec: CollectionSpec) -> dict[str, tuple[str, FieldKind]]:
        """Return label and type by column."""
        from connector.discovery.labels import labels

        table: Table = self._parts.source.describe(spec.source)
        found = {column.name: column.comment.strip() for column in table.columns}
        with suppress(ConnectorError):  # a source without HANA, or without rights
            found |= labels(self._parts.pool("hana"), table)
        return {column.name: (_shortened(found[column.name]) or column.name, _kind(column)) for column in table.columns}

    def _values(self, spec: CollectionSpec, within: Filter | Nothing | None) -> dict[str, dict[str, str]]:
        """Return texts by code, by column, for the most frequent codes of a sample of the visible rows."""
        from connector.discovery.labels import value_texts
        from connector.discovery.sap_tables import VALUES

        columns = {column: name for column, name in metadata_names(spec.metadata).items() if column in VALUES}

        def sample(view: VisibleView, _: CollectionStatus) -> list[StoredText]:
            return view.sample(SAMPLE, texts=False).chosen

        rows = self._collections.read(spec.name, within, sample) if columns else None
        found = {}
        for column, name in columns.items():
            with suppress(ConnectorError):
                codes, schema = _codes(rows or (), name), spec.source.schema
                found[column] = value_texts(self._parts.pool("hana"), schema, column, codes, where=spec.where)
        return found

    def _look(self, key: tuple[str, str], read: Callable[[], T], nothing: T) -> T:
        """Return the result of `read`, which runs in a thread; the last one while it is read anew. Only the first
        readers wait, at most _WAIT."""
        with self._lock:
            now, look = time.monotonic(), self._looks.get(key)
            if look is None or (look.done.is_set() and now >= look.until):
                self._looks.pop(key, None)
                look = self._looks[key] = _Look(nothing, now) if look is None else _Look(look.result, -math.inf)
                while len(self._looks) > _MOST_KEPT:
                    del self._looks[next(iter(self._looks))]
                threading.Thread(target=_run, args=(look, read), name="owl-sap-labels", daemon=True).start()
        look.done.wait(max(0.0, look.begun + _WAIT - time.monotonic()))
        result: T = look.result
        return result


def _run(look: _Look, read: Callable[[], Any]) -> None:
    kept = _KEPT_FAILED
    with suppress(Exception):  # labels are an extra: readiness and doctor report the error
        look.result, kept = read(), _KEPT
    look.until = time.monotonic() + kept
    look.done.set()


def _shortened(comment: str) -> str:
    """Return the beginning of a comment: some developers write a whole paragraph."""
    text = " ".join(comment.split())
    return text if len(text) <= _LONGEST_LABEL else f"{text[: _LONGEST_LABEL - 2].rsplit(' ', 1)[0]} …"


def _codes(rows: Iterable[StoredText], name: str) -> list[str]:
    found = Counter(value for row in rows if isinstance(value := row.metadata.get(name), str))
    return [code for code, _ in found.most_common(MOST_VALUES) if 0 < len(code) <= _LONGEST_CODE]


def _kind(column: Column) -> FieldKind:
    if column.type_name in NUMBERS:
        return "number"
    if column.type_name in ("DATE", "TIMESTAMP", "SECONDDATE") or is_dats(column):
        return "date"
    if column.type_name == "TIME" or is_tims(column):
        return "time"
    return "boolean" if column.type_name == "BOOLEAN" else "text"

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
from typing import Any, Literal

from app.src.access.principal import Principal
from app.src.access.rows import Nothing, Rights
from app.src.service.browse import NUMBERS, SAMPLE
from app.src.service.collections import Collections
from app.src.service.wiring import Parts
from connector.document.document import metadata_names
from connector.document.values import is_dats, is_tims
from connector.errors import ConnectorError
from connector.model import CollectionSpec, Column, Filter, StoredText

MOST_VALUES = 200  # texts of one field
_LONGEST_CODE = 40
_LONGEST_LABEL = 60
_KEPT, _KEPT_FAILED = 300.0, 60.0  # seconds
_WAIT = 1.5  # seconds that a request waits for HANA; then it gets what was known before
_MOST_KEPT = 200

FieldKind = Literal["text", "number", "date", "time", "boolean"]


@dataclass(frozen=True, slots=True)
class LabelledField:
    """A key column or a metadata field. `label`: HANA's comment, else the name. `values`: texts by code, of codes in
    rows that the caller may see, where a text table is known; at most 200."""

    name: str
    label: str
    type: FieldKind
    values: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Kept:
    """`known`: the last result. `until`: when it is read again. `done`: set after the first reading."""

    begun: float
    until: float = -math.inf
    known: dict[str, Any] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)


class Labels:
    """Thread-safe. Without HANA, or without the right to read a table, labels are the raw names and codes."""

    def __init__(self, parts: Parts, collections: Collections, rights: Rights) -> None:
        self._parts = parts
        self._collections = collections
        self._rights = rights
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str], _Kept] = {}

    def fields(self, name: str, key: Sequence[str], *, principal: Principal) -> list[LabelledField]:
        """Return the key columns (`key`, or the configured ones), then the metadata fields; [] for a collection that
        clients write. Raises UnknownCollection."""
        spec = self._collections.spec(name)
        if spec.written_by_clients:
            return []
        known = self._cached((name, ""), lambda: self._columns(spec))
        texts: dict[str, dict[str, str]] = {}
        if principal.may("search"):
            within = self._rights.visible(name, principal)
            whose = json.dumps(within, sort_keys=True, default=str)
            texts = self._cached((name, whose), lambda: self._values(spec, within))
        fields = []
        for column, shown in ({column: column for column in key or spec.key} | metadata_names(spec.metadata)).items():
            label, kind = known.get(column, (shown, "text"))
            fields.append(LabelledField(shown, label, kind, texts.get(column, {})))
        return fields

    def _columns(self, spec: CollectionSpec) -> dict[str, tuple[str, FieldKind]]:
        """Return label and type by column. The columns of a view have rarely a comment of their own: they get that of
        their namesakes in the schema's tables."""
        from connector.hana.catalog import comments_by_name

        table = self._parts.source.describe(spec.source)
        comments = {column.name: column.comment for column in table.columns}
        bare = [name for name, comment in comments.items() if not comment.strip()]
        if table.is_view and bare:
            with suppress(ConnectorError):  # a source without HANA, or without rights
                comments |= comments_by_name(self._parts.pool("hana"), table.ref.schema, bare)
        found: dict[str, tuple[str, FieldKind]] = {}
        for column in table.columns:
            label = " ".join(comments[column.name].split())
            if len(label) > _LONGEST_LABEL:  # some developers write a whole paragraph
                label = f"{label[: _LONGEST_LABEL - 2].rsplit(' ', 1)[0]} …"
            found[column.name] = label or column.name, _kind(column)
        return found

    def _values(self, spec: CollectionSpec, within: Filter | Nothing | None) -> dict[str, dict[str, str]]:
        """Return texts by code, by column, for the most frequent codes of a sample of the visible rows."""
        from connector.discovery.labels import value_texts
        from connector.discovery.sap_tables import VALUES

        columns = {column: name for column, name in metadata_names(spec.metadata).items() if column in VALUES}
        rows: Iterable[StoredText] = ()
        if columns:
            rows = (
                self._collections.read(spec.name, within, lambda view, _: view.sample(SAMPLE, texts=False).chosen) or ()
            )
        found = {}
        for column, name in columns.items():
            ranked = Counter(code for row in rows if isinstance(code := row.metadata.get(name), str)).most_common(
                MOST_VALUES
            )
            codes = [code for code, _ in ranked if 0 < len(code) <= _LONGEST_CODE]
            with suppress(ConnectorError):
                pool, schema = self._parts.pool("hana"), spec.source.schema
                found[column] = value_texts(pool, schema, column, codes, where=spec.where, whole=within is None)
        return found

    def _cached(self, key: tuple[str, str], read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `read` returned in the last minutes or before it failed. It runs in a thread of its own, because
        HANA may hang: only the first callers wait, at most _WAIT."""
        with self._lock:
            now = time.monotonic()
            kept = self._kept.setdefault(key, _Kept(now))
            if now >= kept.until:
                kept.until = math.inf
                threading.Thread(target=_read, args=(kept, read), name="owl-sap-labels", daemon=True).start()
            if len(self._kept) > _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
        kept.done.wait(max(0.0, kept.begun + _WAIT - now))
        return kept.known


def _read(kept: _Kept, read: Callable[[], dict[str, Any]]) -> None:
    seconds = _KEPT_FAILED
    with suppress(Exception):  # labels are an extra: readiness and doctor report the error
        kept.known, seconds = read(), _KEPT
    kept.until = time.monotonic() + seconds
    kept.done.set()


def _kind(column: Column) -> FieldKind:
    if column.type_name in NUMBERS:
        return "number"
    if column.type_name in ("DATE", "TIMESTAMP", "SECONDDATE") or is_dats(column):
        return "date"
    if column.type_name == "TIME" or is_tims(column):
        return "time"
    return "boolean" if column.type_name == "BOOLEAN" else "text"

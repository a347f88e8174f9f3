"""The settings of a collection: either a source table with change detection and schedule, or written by clients."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Literal
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from app.src.settings.section import Columns, Duration, Section, setting
from connector.model import NO_TABLE, ChangeSpec, ChunkSpec, CollectionSpec, TableRef

_ODD = re.compile(r"[^A-Za-z0-9_]")

ClaimPath = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(min_length=1),
    # A claim may be a plain string; its dots belong to the name.
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
]


def _table(name: str) -> str:
    if name:
        TableRef.parse(name)
    return name


Table = Annotated[str, AfterValidator(_table)]
Method = Literal["full", "watermark", "log", "rowid", "delta"]


class ChunkSettings(Section):
    max_tokens: int | None = setting(None, "without special tokens; default: the model's limit", ge=8)
    overlap: int = setting(32, "tokens that a chunk shares with the previous one", ge=0)

    @model_validator(mode="after")
    def _overlap_fits(self) -> ChunkSettings:
        if self.max_tokens is not None and self.overlap >= self.max_tokens:
            raise ValueError(f"overlap {self.overlap} must be smaller than max_tokens {self.max_tokens}")
        return self


class ChangesSettings(Section):
    """Change detection at the source."""

    method: Method = setting(
        "full",
        'full compares every row, watermark a column, rowid "$rowid$"; log reads a table that triggers fill, delta one '
        "that SAP Datasphere or SDI fills",
    )
    column: str | None = setting(None, "watermark: the column that every change sets, a UTC time or a rising number")
    delay: Duration = setting(30.0, "watermark, delta: must exceed the longest write; younger changes wait")
    reconcile: Duration = setting(86_400.0, "longest time between full comparisons, which find all changes", gt=0)
    hash: Literal["client", "server"] = setting("client", "full: server hashes in HANA and leaves unchanged rows there")
    log: Table | None = setting(None, "log: SCHEMA.TABLE; default: OWL_LOG_<NAME> beside the source")
    table: Table | None = setting(None, "delta: SCHEMA.TABLE; default: <TABLE>_Delta beside the source")
    type: str | None = setting(None, "delta: column with a record's type; default: Change_Type or SDI_CHANGE_TYPE")
    at: str | None = setting(None, "delta: column with a record's time, UTC; default: Change_Date or SDI_CHANGE_TIME")

    @model_validator(mode="after")
    def _fits(self) -> ChangesSettings:
        if self.method == "watermark" and not self.column:
            raise ValueError('method = "watermark" needs column = "...", the column that every change sets')
        own = {"column": ("watermark", self.column), "log": ("log", self.log), "hash": ("full", self.hash == "server")}
        own |= {name: ("delta", getattr(self, name)) for name in ("table", "type", "at")}
        for name, (method, value) in own.items():
            if value and self.method != method:
                raise ValueError(f'{name} belongs to method = "{method}", but method is "{self.method}"')
        return self

    def spec(self) -> ChangeSpec:
        tables = {name: TableRef.parse(named) for name in ("log", "table") if (named := getattr(self, name))}
        return ChangeSpec(**{**self.model_dump(), "log": None, "table": None, **tables})


class ScheduleSettings(Section):
    """When a collection is synced automatically."""

    every: Duration | None = setting(None, 'span from start to start: "5m", "1h30m"', ge=1)
    cron: str | None = setting(None, 'minute hour day month weekday: "15 2 * * *"')
    timezone: str = setting("UTC", "time zone of `cron`, such as Europe/Berlin, including summer time")
    jitter: Duration = setting(0.0, "random delay of each start, at most this long (30s)")

    @field_validator("cron")
    @classmethod
    def _five_fields(cls, cron: str | None) -> str | None:
        if cron is not None and len(cron.split()) != 5:
            raise ValueError(f"{cron!r} is not a cron line: it needs five fields, minute hour day month weekday")
        try:
            if cron is not None and next(CronSim(cron, datetime.now(UTC)), None) is None:
                raise ValueError(f"{cron!r} names a day that never occurs")
        except CronSimError as error:
            raise ValueError(f"{cron!r} is not a cron line: {str(error)[:1].lower()}{str(error)[1:]}") from None
        return cron

    @field_validator("timezone")
    @classmethod
    def _known_zone(cls, timezone: str) -> str:
        try:
            return ZoneInfo(timezone).key
        except (KeyError, OSError, ValueError):
            raise ValueError(f"unknown time zone {timezone!r}; use an IANA name such as Europe/Berlin") from None

    @model_validator(mode="after")
    def _one_of(self) -> ScheduleSettings:
        if (self.every is None) == (self.cron is None):
            raise ValueError('a schedule needs either every = "5m" or cron = "15 2 * * *"')
        if self.every is not None and "timezone" in self.model_fields_set:
            raise ValueError("timezone applies only to cron, not to `every`")
        return self


class CollectionSettings(Section):
    """One `[[collections]]` block."""

    name: str = setting(..., "letters, digits, - and _")
    documents: bool = setting(False, "clients write it (REST, LangChain); it has no source or sync")
    source: Table = setting("", 'SCHEMA.TABLE, taken literally, case included; quote a part with a dot: S."a.b"')
    template: str = setting("", '"{MAKTX}. {LTEXT}"; {"/BIC/TXT"} for odd names')
    description: str | None = setting(None, "its content, in one sentence for agents", max_length=1000)
    examples: tuple[str, ...] = setting((), "queries that the console offers", max_length=10)
    key: Columns = setting((), "key columns; default: the primary key")
    where: str | None = setting(None, "your own SQL condition, sent unchanged")
    metadata: Columns = setting((), "columns stored beside the vector, for filters")
    row_rights: dict[str, ClaimPath] = setting({}, "metadata column = claim, or its path: docs/row-rights.md")
    model: str | None = setting(None, "its own model; default: [embedding] model", min_length=1)
    query_prompt: str | None = setting(None, "as in [embedding]; default: that of the model or of [embedding]")
    document_prompt: str | None = setting(None, "as in [embedding]; default: that of the model or of [embedding]")
    remote_source: str | None = setting(None, "as in [embedding], for its own model", min_length=1)
    changes: ChangesSettings = setting(ChangesSettings(), "how changes are found")
    chunk: ChunkSettings = setting(ChunkSettings(), "how long texts are split")
    schedule: ScheduleSettings | None = setting(None, "when `serve` or `worker` syncs automatically")
    switch: Literal["manual", "auto"] = setting("manual", "auto: switch to a new model once complete and verified")

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if not re.fullmatch("[A-Za-z0-9_-]{1,100}", name):
            raise ValueError(f"{name!r} is not a collection name: use letters, digits, - and _, at most 100 characters")
        return name

    @model_validator(mode="after")
    def _of_a_table_or_of_clients(self) -> CollectionSettings:
        of_tables = ("source", "template", "key", "where", "changes", "schedule", "switch")
        default = {name: field.default for name, field in type(self).model_fields.items()}
        given = [name for name in of_tables if getattr(self, name) != default[name]]
        if self.documents and given:
            raise ValueError(
                "documents = true means that clients write the collection, so it cannot have table settings "
                f"({', '.join(given)}): remove one or the other"
            )
        missing = [name for name in ("source", "template") if not getattr(self, name).strip()]
        if not self.documents and missing:
            raise ValueError(
                f"{' and '.join(missing)} missing: a collection is synced from a table (source = "
                '"SCHEMA.TABLE", template = "{COLUMN}"), or clients write it (documents = true)'
            )
        odd = [name for name in self.metadata if self.documents and _ODD.search(name)]
        if odd:
            raise ValueError(f'invalid metadata name "{odd[0]}" of documents: use letters, digits and _, as in filters')
        return self

    @model_validator(mode="after")
    def _rights_are_kept(self) -> CollectionSettings:
        """Check that columns of row rights are in the metadata, under names that no other column can get."""
        for column in self.row_rights:
            if column not in self.metadata:
                raise ValueError(
                    f'row_rights names the column "{column}", which is not declared in metadata: write '
                    f"metadata = [{', '.join((*self.metadata, column))}] and sync"
                )
            for each in self.metadata:
                # Both may get the same metadata name (`connector.document.document.metadata_names`).
                one, other = (re.sub(r"(_\d+)+$", "", _ODD.sub("_", name).strip("_")) for name in (each, column))
                if each != column and one == other and _ODD.search(each + column):
                    raise ValueError(
                        f'row_rights names the column "{column}", but the metadata column "{each}" gets the same name '
                        "when special characters are replaced: rename one of them in a view"
                    )
        return self

    def spec(self) -> CollectionSpec:
        chunk = ChunkSpec(self.chunk.max_tokens, self.chunk.overlap)
        if self.documents:
            return CollectionSpec(self.name, NO_TABLE, "", ("id",), metadata=self.metadata, chunk=chunk)
        same = self.model_dump(include={"name", "template", "key", "where", "metadata"})
        return CollectionSpec(source=TableRef.parse(self.source), chunk=chunk, changes=self.changes.spec(), **same)

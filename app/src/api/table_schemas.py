"""What the routes of HANA's catalogue take and answer: tables, proposals, previews."""

from __future__ import annotations

from pydantic import BaseModel, Field

from app.src.api.schemas import Body


class TableBody(BaseModel):
    schema_name: str = Field(alias="schema")
    name: str
    kind: str = Field(examples=["table", "view"])
    comment: str
    columns: int
    rows: int | None = Field(description="as HANA keeps count; null for views, and where the user may not see it")


class ColumnBody(BaseModel):
    name: str
    type_name: str
    length: int = Field(description="characters, bytes or decimal precision")
    scale: int
    nullable: bool
    comment: str


class ProposalBody(BaseModel):
    """A proposed `[[collections]]` block, its reasons, and all of it as text for owl-sap.toml."""

    name: str
    source: str
    key: list[str]
    where: str | None = None
    template: str
    metadata: list[str]
    changes: dict[str, str] = Field(examples=[{"method": "full"}], description="how changes would be found")
    reasons: dict[str, str] = Field(description="by setting")
    guessed: list[str] = Field(description="settings of which nothing proves that they are right")
    notes: list[str]
    create_view: str | None = Field(description="SQL of a view that joins the table with its texts")
    toml: str


class TableDetailBody(BaseModel):
    schema_name: str = Field(alias="schema")
    name: str
    kind: str
    comment: str
    rows: int | None
    key: list[str] = Field(description="the primary key")
    columns: list[ColumnBody]
    proposal: ProposalBody | None
    reason: str | None = Field(description="why there is no proposal")


class PreviewRequest(Body):
    """Which texts to show of a table."""

    template: str | None = Field(
        default=None,
        min_length=1,
        max_length=10_000,
        description="columns in braces; null: as proposed",
        examples=["{MAKTX}. {LTEXT}"],
    )
    samples: int = Field(default=5, ge=0, le=50, description="texts to show")


class SampledTextBody(BaseModel):
    text: str = Field(examples=["Gearbox oil, 20 l drum"], description="cut after 20,000 characters")
    tokens: int = Field(examples=[9], description="of the whole text, without special tokens")


class PreviewBody(BaseModel):
    """What a template makes of a few hundred rows from all over a table. Nothing is written or embedded."""

    source: str = Field(examples=["SAPDEMO.MAKT"], description="whose rows: a text table, where the other has no text")
    template: str = Field(examples=["{MAKTX}"])
    samples: list[SampledTextBody]
    histogram: dict[str, int] = Field(examples=[{"0-16": 180, "17-32": 20}], description="rows with text by tokens")
    truncated: int = Field(description="rows that would lose text; 0 with every chunking that is accepted")
    chunked: int = Field(description="rows that would be cut into several chunks")
    empty: int = Field(description="rows without text, which are not embedded")
    unreadable: int = Field(description="rows that cannot be rendered and go to quarantine")
    sampled: int = Field(description="rows that were rendered")
    max_tokens: int = Field(description="what the model takes")

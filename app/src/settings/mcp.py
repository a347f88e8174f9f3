"""The section [mcp]: what agents are offered over the Model Context Protocol."""

from __future__ import annotations

from pydantic import Field, SecretStr

from app.src.settings.section import Section


class McpSettings(Section):
    """Tools for agents (docs/agents.md). `owl-sap mcp` offers them to whoever starts it, whatever `http` is."""

    http: bool = Field(
        default=False, description="the service offers them at POST /mcp too, to keys with the scope search"
    )
    write: bool = Field(
        default=False, description="also the tool that changes something (start_sync), to who has the scope sync"
    )
    key: SecretStr | None = Field(
        default=None,
        description="API key or token whose rights `owl-sap mcp` has; default: the operator's, who sees every row",
    )
    max_hits: int = Field(default=50, ge=1, le=1000, description="rows that one search may ask for")
    max_chars: int = Field(
        default=40_000,
        ge=2_000,
        le=1_000_000,
        description="characters of texts and metadata in one answer; what is longer is cut, and the answer says so",
    )

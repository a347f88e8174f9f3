"""The section [search]: the reranker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from app.src.settings.durations import Duration
from app.src.settings.section import Section

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class SearchSettings(Section):
    """A reranker (docs/search.md)."""

    rerank: str = Field(
        default="off",
        description="off; /folder of a cross-encoder; or package.module:function, your own code",
    )
    rerank_depth: int = Field(default=50, ge=1, le=1000, description="how many of the best hits are reranked")
    rerank_seconds: Duration = Field(
        default=2.0, gt=0, description="time limit of the reranker; after that the order stays unchanged"
    )

    @field_validator("rerank")
    @classmethod
    def _known(cls, rerank: str) -> str:
        if rerank == "off" or _FUNCTION.fullmatch(rerank) or _is_path(rerank):
            return rerank
        if rerank == "late-interaction":
            raise ValueError("late-interaction was removed; name a cross-encoder folder, your own function, or off")
        raise ValueError(
            "must be off, a folder or package.module:function; a folder begins with / or ./, a function is module:name"
        )

    @property
    def kind(self) -> Literal["off", "cross-encoder", "function"]:
        if self.rerank == "off":
            return "off"
        return "cross-encoder" if _is_path(self.rerank) else "function"

    @property
    def folder(self) -> Path:
        """Of the cross-encoder."""
        return Path(self.rerank).expanduser()


def _is_path(rerank: str) -> bool:
    return rerank.startswith(("/", "./", "../", "~/"))

"""The section [search]: whether the best hits are put in order once more, and by what."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from app.src.settings.durations import Duration
from app.src.settings.section import Section

OFF, LATE_INTERACTION = "off", "late-interaction"
_NAMED = (OFF, LATE_INTERACTION)
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class SearchSettings(Section):
    """A reranker (docs/search.md)."""

    rerank: str = Field(
        default=OFF,
        description="off; late-interaction; /folder of a cross-encoder; or package.module:function, your own code",
    )
    rerank_depth: int = Field(default=50, ge=1, le=1000, description="hits that are put in order anew")
    rerank_seconds: Duration = Field(
        default=2.0, gt=0, description="seconds that it may take; beyond that the order stays as it was"
    )

    @field_validator("rerank")
    @classmethod
    def _known(cls, rerank: str) -> str:
        if rerank in _NAMED or _FUNCTION.fullmatch(rerank) or _is_path(rerank):
            return rerank
        near = difflib.get_close_matches(rerank, _NAMED, n=1)
        hint = f'did you mean "{near[0]}"?' if near else "a folder begins with / or ./, a function is module:function"
        raise ValueError(f"must be off, late-interaction, a folder or package.module:function; {hint}")

    @property
    def kind(self) -> Literal["off", "late-interaction", "cross-encoder", "function"]:
        if self.rerank == OFF:
            return "off"
        if self.rerank == LATE_INTERACTION:
            return "late-interaction"
        return "cross-encoder" if _is_path(self.rerank) else "function"

    @property
    def folder(self) -> Path:
        """Of the cross-encoder."""
        return Path(self.rerank).expanduser()


def _is_path(rerank: str) -> bool:
    return rerank.startswith(("/", "./", "../", "~/"))

"""What every section of the settings is made of. Knows none of them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


def _parts(value: Any) -> Any:
    """One name may be written as a plain string; `MANDT, MATNR` in a variable is two."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Columns = Annotated[tuple[str, ...], BeforeValidator(_parts)]


class Section(BaseModel):
    # `schema` is the word of SAP's own clients; pydantic's deprecated method of that name is given up for it.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)

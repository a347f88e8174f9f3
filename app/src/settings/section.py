"""What every section of the settings is made of. Knows none of them."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict


def _parts(value: Any) -> Any:
    """One name may be written as a plain string; `MANDT, MATNR` in a variable is two."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Columns = Annotated[tuple[str, ...], BeforeValidator(_parts)]


def _networks(addresses: tuple[str, ...]) -> tuple[str, ...]:
    for address in addresses:
        try:
            ipaddress.ip_network(address)
        except ValueError:
            raise ValueError(f"{address!r} is no address and no network, such as 10.0.0.0/8") from None
    return addresses


Networks = Annotated[tuple[str, ...], BeforeValidator(_parts), AfterValidator(_networks)]


class Section(BaseModel):
    # `schema` is the word of SAP's own clients; pydantic's deprecated method of that name is given up for it.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)

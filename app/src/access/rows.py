"""Row rights: the visible rows of a collection for a principal, as a filter that the request cannot widen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from app.src.access.audit import shape_of
from app.src.access.principal import Principal
from app.src.settings import CollectionSettings
from connector.errors import BadFilter
from connector.model import Filter

# Values of all claims in one search. A filter has up to 100 conditions, HANA may repeat the values for each, and a
# statement takes at most 32,767 parameters.
MOST_VALUES = 200
_LARGEST = 2**63
_log = logging.getLogger(__name__)

ClaimPath = tuple[str, ...]  # the names of the enclosing objects, then of the claim


@dataclass(frozen=True, slots=True)
class Nothing:
    """No row is visible; `why` is a message for the caller, without values of claims."""

    why: str


class RowsRefused(Exception):
    """The request would show rows, or facts about single rows, that the caller may not see."""


def visible(rights: Mapping[str, ClaimPath], names: Mapping[str, str], principal: Principal) -> Filter | Nothing | None:
    """Return the rows that `principal` may see: a filter, Nothing, or None for all rows.

    `rights`: metadata column -> the claim with its visible values; all must match. `names`: metadata column -> its name
    in the metadata. A claim is a text, an integer, or a list of these; anything else (missing, empty, true, an object,
    more than MOST_VALUES values) makes no row visible. A row without the column's value is not visible. Values are
    compared as whole texts by code point; "*" is not a pattern.
    """
    if not rights or principal.every_row:
        return None
    within: dict[str, Any] = {}
    count = 0
    for column, path in rights.items():
        claim: Any = principal.claims
        for name in path:
            claim = claim.get(name) if isinstance(claim, Mapping) else None
        values = _values(claim)
        if isinstance(values, str):
            return Nothing(f'no row is visible: the claim "{".".join(path)}" {values}')
        count += len(values)
        if count > MOST_VALUES:
            return Nothing(f"no row is visible: the claims have more than {MOST_VALUES} values")
        within[names[column]] = {"$in": values}
    return within


def _values(claim: Any) -> list[str] | str:
    """Return the visible texts, or what is wrong with the claim."""
    from connector.stores.filters import parse

    if claim is None:
        return "is missing"
    several = isinstance(claim, Sequence) and not isinstance(claim, str | bytes | bytearray)
    given = list(claim) if several else [claim]
    if not given:
        return "is an empty list"
    if len(given) > MOST_VALUES:
        return f"has more than {MOST_VALUES} values"
    texts: dict[str, None] = {}
    for value in given:
        integer = isinstance(value, int) and not isinstance(value, bool) and -_LARGEST <= value < _LARGEST
        text = str(value) if integer else value
        try:
            suits = isinstance(text, str) and bool(text.strip())
            parse({"COLUMN": text})
        except BadFilter:
            suits = False
        if not suits:
            return "holds values other than texts and integers"
        texts[text] = None
    return list(texts)


Row = TypeVar("Row", bound=Any)  # has `metadata`


def seen(rows: Iterable[Row], within: Filter | None) -> list[Row]:
    """Filter the store's rows again, in case the store is faulty. `within`: as `visible` returns it."""
    given = list(rows)
    if within is None:
        return given

    def fits(metadata: Mapping[str, Any]) -> bool:
        values = {name: metadata.get(name) for name in within}
        texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}
        plain = all(isinstance(value, str | int | float) for value in values.values())
        return plain and all(texts[name] in test["$in"] for name, test in within.items())

    kept = [row for row in given if fits(row.metadata)]
    if len(kept) < len(given):
        _log.error("the store gave %d rows outside the caller's row rights; they are not shown", len(given) - len(kept))
    return kept


class Rights:
    """The row rights of the configured collections. `blocks` returns their settings; `block` one's settings, or it
    raises UnknownCollection."""

    def __init__(
        self, blocks: Callable[[], Iterable[CollectionSettings]], block: Callable[[str], CollectionSettings]
    ) -> None:
        self._blocks = blocks
        self._block = block

    def visible(self, name: str, principal: Principal) -> Filter | Nothing | None:
        """Return the visible rows of a collection, as the function `visible` does."""
        from connector.document.document import metadata_names

        block = self._block(name)
        return visible(block.row_rights, metadata_names(block.metadata), principal)

    def extent(self, name: str, principal: Principal) -> str:
        """Return how many rows of a collection are visible, for the audit log: all, some or none."""
        within = self.visible(name, principal)
        return "all" if within is None else "none" if isinstance(within, Nothing) else "some"

    def check_every_row(self, principal: Principal, name: str | None = None) -> None:
        """Raise RowsRefused unless the principal may see every row of the collection (None: of any table)."""
        for block in self._blocks() if name is None else [self._block(name)]:
            if block.row_rights and not principal.every_row:
                raise RowsRefused(
                    f'"{block.name}" has row rights, and this request shows rows of all owners: it needs a key with '
                    "every_row"
                )

    def filter_shape(self, name: str, where: Filter | None) -> Any:
        """Return the filter's shape for the audit log."""
        from connector.document.document import metadata_names

        return shape_of(where, metadata_names(self._block(name).metadata))

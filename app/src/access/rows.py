"""Row rights: the rows of a collection that a principal may see, as a filter that nothing in its request can widen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from app.src.access.audit import shape_of
from app.src.access.principal import Principal
from app.src.settings import CollectionSettings, Settings
from connector.errors import BadFilter
from connector.model import Filter

MOST_VALUES = 200
"""Of all claims together that one search is narrowed by. A user's filter has up to 100 conditions, each of which may
repeat them in HANA, and a statement takes 32,767 parameters."""
_LARGEST = 2**63
_log = logging.getLogger(__name__)

ClaimPath = tuple[str, ...]
"""Where a claim stands: its name, behind the names of the objects that it lies in."""


@dataclass(frozen=True, slots=True)
class Nothing:
    """No row may be seen; `why` is a sentence for who asks, and holds no value of a claim."""

    why: str


class RowsRefused(Exception):
    """What was asked for shows rows, or says something about single ones, and who asks may not see all of them."""


def visible(rights: Mapping[str, ClaimPath], names: Mapping[str, str], principal: Principal) -> Filter | Nothing | None:
    """The rows that `principal` may see: those that the filter holds for, none, or (None) all of them.

    `rights`: metadata column -> the claim that says which of its values may be seen; all of them must hold. `names`:
    metadata column -> its name in the metadata. A claim is a text or a whole number, or a list of such; anything else
    (missing, empty, true, an object, more than MOST_VALUES values) leaves nothing to be seen, and so does a column that
    has no value in a row. Values are compared as texts, whole and by code point: they are no patterns, "*" is a star.
    """
    if not rights or principal.every_row:
        return None
    within: dict[str, Any] = {}
    count = 0
    for column, path in rights.items():
        values = _values(_claim(principal.claims, path))
        if isinstance(values, str):
            return Nothing(f'no row may be seen: the claim "{".".join(path)}" {values}')
        count += len(values)
        if count > MOST_VALUES:
            return Nothing(f"no row may be seen: the claims have more than {MOST_VALUES} values")
        within[names[column]] = {"$in": values}
    return within


class _Described(Protocol):
    @property
    def metadata(self) -> Mapping[str, Any]: ...


Row = TypeVar("Row", bound=_Described)


def seen(rows: Iterable[Row], within: Filter | None) -> list[Row]:
    """Those that may be seen: all of them, for the store was told. A store that errs must not show what it found."""
    from connector.stores.filters import matches, parse

    condition, given = parse(within), list(rows)
    if condition is None:
        return given
    kept = [row for row in given if matches(condition, row.metadata)]
    if len(kept) < len(given):
        _log.error(
            "the store gave %d rows outside the row rights of who asked; they are not shown", len(given) - len(kept)
        )
    return kept


def check_every_row(collection: str, rights: Mapping[str, ClaimPath], principal: Principal) -> None:
    """Raises RowsRefused when there may be rows of the collection that `principal` must not see."""
    if rights and not principal.every_row:
        raise RowsRefused(
            f'"{collection}" has row rights, and this shows rows whoever they belong to: it takes a key that is '
            "allowed to see every row (every_row)"
        )


def _claim(claims: Mapping[str, Any], path: ClaimPath) -> Any:
    found: Any = claims
    for name in path:
        if not isinstance(found, Mapping):
            return None
        found = found.get(name)
    return found


def _values(claim: Any) -> list[str] | str:
    """The texts that a column may hold; or what is wrong with the claim."""
    if claim is None:
        return "is missing"
    several = isinstance(claim, Sequence) and not isinstance(claim, str | bytes | bytearray)
    given = list(claim) if several else [claim]
    if not given:
        return "is an empty list"
    if len(given) > MOST_VALUES:
        return f"has more than {MOST_VALUES} values"
    texts = [_text(value) for value in given]
    known = [text for text in texts if text is not None]
    if len(known) < len(texts):
        return "holds something else than texts and whole numbers"
    return list(dict.fromkeys(known))


def _text(value: Any) -> str | None:
    """As the metadata's JSON holds it; None for what is no value to be seen by."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return str(value) if -_LARGEST <= value < _LARGEST else None
    return value if isinstance(value, str) and value.strip() and _comparable(value) else None


def _comparable(text: str) -> bool:
    from connector.stores.filters import parse

    try:
        parse({"COLUMN": text})
    except BadFilter:
        return False
    return True


class Rights:
    """`block` finds a collection by its name. Everything here raises UnknownCollection as it does."""

    def __init__(self, settings: Settings, block: Callable[[str], CollectionSettings]) -> None:
        self._settings = settings
        self._block = block

    def visible(self, name: str, principal: Principal) -> Filter | Nothing | None:
        """As `rows.visible`."""
        from connector.document.document import metadata_names

        block = self._block(name)
        return visible(block.row_rights, metadata_names(block.metadata), principal)

    def check_every_row(self, principal: Principal, name: str | None = None) -> None:
        """For what shows rows of the collection (None: of any table) whoever they belong to. Raises RowsRefused."""
        for block in self._settings.collections if name is None else [self._block(name)]:
            check_every_row(block.name, block.row_rights, principal)

    def filter_shape(self, name: str, where: Filter | None) -> Any:
        """As `audit.shape_of`."""
        from connector.document.document import metadata_names

        return shape_of(where, metadata_names(self._block(name).metadata))

"""Immutable blocks of rows; a new version rebuilds only blocks with changed rows and shares the others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from operator import itemgetter
from typing import Any, Protocol, TypeVar

from hana_emulator.sql.storage.row_versions import Rowids

ROWS = 256  # Maximum rows of a new block; a block with changed rows may have up to twice as many


class Block(Protocol):
    """A non-empty block of rows with their values. `rowids` are ascending."""

    @property
    def rowids(self) -> Rowids: ...

    @property
    def nbytes(self) -> int: ...

    def rows(self) -> Iterable[tuple[int, Any]]:
        """The rows from which the block was made."""


B = TypeVar("B", bound=Block)
Row = tuple[int, Any]


def cut(rows: Sequence[Row], make: Callable[[Sequence[Row]], B], most: int = ROWS) -> list[B]:
    """Split `rows`, which are ascending by rowid, into blocks."""
    if len(rows) <= most:
        return [make(rows)] if rows else []
    return [make(rows[start : start + ROWS]) for start in range(0, len(rows), ROWS)]


def changed(
    blocks: Sequence[B], gone: AbstractSet[int], new: Iterable[Row], make: Callable[[Sequence[Row]], B]
) -> list[B]:
    """Blocks without the rows `gone` and with the rows `new`; only affected blocks are rebuilt."""
    if not blocks:
        return cut(sorted(new, key=itemgetter(0)), make)
    starts = [int(block.rowids[0]) for block in blocks]

    def place(rowid: int) -> int:
        return max(bisect_right(starts, rowid) - 1, 0)

    added: dict[int, dict[int, Any]] = {place(rowid): {} for rowid in gone}
    for rowid, value in new:
        added.setdefault(place(rowid), {})[rowid] = value
    found: list[B] = []
    for number, block in enumerate(blocks):
        if number in added:
            kept = {rowid: value for rowid, value in block.rows() if rowid not in gone} | added[number]
            found += cut(sorted(kept.items(), key=itemgetter(0)), make, 2 * ROWS)
        else:
            found.append(block)
    if len(found) > 8 + 2 * sum(len(block.rowids) for block in found) // ROWS:  # deletions have left small blocks
        return cut([row for block in found for row in block.rows()], make)
    return found

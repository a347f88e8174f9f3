"""Exact search with the vectors on the card: one pass over them in fp16, with a bound on what that rounding can do to a
score, so that whoever holds the true vectors scores the few rows that may be the best. What the card's memory does not
hold is scanned elsewhere, beside it.

Knows arrays, a device and its memory; no store. The shapes are those of `connector.protocols.VectorScan`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from .device import DeviceProfile
from .memory import T4MemoryManager

FIRST_ROWS, MOST_ROWS = 1024, 65_536
"""Rows of a collection's first block and of its largest: each is as large as all before it, so that small collections
take little memory and growing copies nothing."""
ELEMENT = 2
"""Bytes of a number in fp16."""
ROWS_AT_ONCE = 8192
"""Rows that are rounded together: what that needs beside the block is not booked."""
KEPT_SHARE = 2.0
"""How far beyond the bookable share a copy of kept rows may go while the old one is still there: it is no larger."""
_EPSILON = float(np.finfo(np.float32).eps)

Vectors = NDArray[np.float32]
Positions = NDArray[np.int64]


class Ranking(Protocol):
    def best(self, count: int) -> tuple[Positions, float]: ...


class View(Protocol):
    def rank(self, queries: Vectors, allowed: NDArray[np.bool_] | None) -> list[Ranking]: ...

    def rank_rows(self, query: NDArray[np.float32], rows: Positions) -> Ranking: ...


class Copy(Protocol):
    def append(self, vectors: Vectors) -> None: ...

    def kept(self, rows: NDArray[np.bool_]) -> Copy: ...

    def view(self) -> View: ...


class Scan(Protocol):
    def copy(self, dimension: int) -> Copy: ...


class CardScan:
    """A `VectorScan` on one card, 2 bytes x dimension a row. `elsewhere` scans what finds no room there."""

    def __init__(self, profile: DeviceProfile, memory: T4MemoryManager, elsewhere: Scan) -> None:
        self._card = _Card(torch.device(profile.torch_name), memory)
        self._elsewhere = elsewhere

    def copy(self, dimension: int) -> CardCopy:
        return CardCopy(self._card, dimension, self._elsewhere.copy)


# ----------------------------------------------------------------------------------------------------------- the card


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries (q, d) and rows (n, d), both fp16 -> dot products (q, n), fp32, added up in fp32."""


class _Card:
    """The device with a stream of its own, ahead of others in the queue: a search does not wait behind a batch of texts
    longer than the kernel that runs."""

    def __init__(self, device: torch.device, memory: T4MemoryManager) -> None:
        self.device = device
        self.memory = memory
        self._stream = None if device.type == "cpu" else torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        with self.work():
            self.product = _product_for(device)

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        beside = torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()
        with torch.inference_mode(), beside:
            yield

    def halves(self, rows: NDArray[np.float32]) -> tuple[torch.Tensor, float]:
        """The rows in fp16 on the device, and the length of the longest difference to what they were."""
        exact = torch.tensor(rows).to(self.device)
        rounded = exact.half()
        lost = torch.linalg.vector_norm((exact - rounded.float()).double(), dim=1)
        return rounded, float(lost.max()) if len(rows) else 0.0


def _product_for(device: torch.device) -> Product:
    """cuBLAS' product with fp32 results where this torch has it and it adds up in fp32; else over a copy in fp32."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(300, 512, generator=generator).half().to(device)
    queries = rows[:3]  # their products with themselves are large, where rounding shows
    wanted = queries.cpu().double() @ rows.cpu().double().T
    try:
        found = _mixed_product(queries, rows).cpu().double()
    except (RuntimeError, TypeError, NotImplementedError):
        return _widened_product
    lengths = queries.cpu().double().norm(dim=1)[:, None] * rows.cpu().double().norm(dim=1)
    return _mixed_product if bool(((found - wanted).abs() <= lengths * 512 * _EPSILON).all()) else _widened_product


def _mixed_product(queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.mm(queries, rows.T, out_dtype=torch.float32)


def _widened_product(queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.mm(queries.float(), rows.float().T)


class _Block:
    """Room for rows on the card; its memory is booked for as long as anything refers to it."""

    def __init__(self, card: _Card, rows: int, dimension: int) -> None:
        """After the memory was booked."""
        size = rows * dimension * ELEMENT
        self._booking = weakref.finalize(self, card.memory.release, size)
        self._booking.atexit = False
        self.rows = torch.empty((rows, dimension), dtype=torch.float16, device=card.device)
        self.used = 0

    @property
    def room(self) -> int:
        return len(self.rows) - self.used


# ------------------------------------------------------------------------------------------------- a collection's copy


class CardCopy:
    """A `ScanCopy`: rows on the card as far as there is room, those behind them elsewhere."""

    def __init__(self, card: _Card, dimension: int, elsewhere: Callable[[int], Copy]) -> None:
        self._card = card
        self._dimension = dimension
        self._elsewhere = elsewhere
        self._blocks: list[_Block] = []
        self._rows = 0
        self._lost = 0.0
        self._rest: Copy | None = None
        self._rest_rows = 0

    @property
    def rows_on_card(self) -> int:
        return self._rows

    def append(self, vectors: Vectors) -> None:
        done = 0
        while done < len(vectors) and self._rest is None:
            block = self._open_block(1.0)
            if block is None:
                self._rest = self._elsewhere(self._dimension)
                break
            some = vectors[done : done + min(block.room, ROWS_AT_ONCE)]
            try:
                with self._card.work():
                    rows, lost = self._card.halves(some)
                    self._write(block, rows)
            except torch.OutOfMemoryError:  # as when there is no room for a block
                self._rest = self._elsewhere(self._dimension)
                break
            self._lost = max(self._lost, lost)
            done += len(some)
        if self._rest is not None and done < len(vectors):
            self._rest.append(vectors[done:])
            self._rest_rows += len(vectors) - done

    def kept(self, rows: NDArray[np.bool_]) -> CardCopy:
        """Rows on the card are copied there; MemoryError when it no longer has room for that."""
        other = CardCopy(self._card, self._dimension, self._elsewhere)
        other._lost = self._lost
        start = 0
        for block in self._blocks:
            mask = torch.tensor(rows[start : start + block.used])
            start += block.used
            with self._card.work():
                other._take(block.rows[: block.used][mask.to(self._card.device)])
        if self._rest is not None:
            other._rest = self._rest.kept(rows[self._rows :])
            other._rest_rows = int(rows[self._rows :].sum())
        return other

    def view(self) -> CardView:
        parts = [(block, block.used) for block in self._blocks]
        rest = self._rest.view() if self._rest is not None else None
        return CardView(self._card, parts, self._lost, rest)

    def _take(self, rows: torch.Tensor) -> None:
        done = 0
        while done < len(rows):
            block = self._open_block(KEPT_SHARE)
            if block is None:
                raise MemoryError("the card's memory does not hold the rows that are kept")
            some = rows[done : done + block.room]
            self._write(block, some)
            done += len(some)

    def _write(self, block: _Block, rows: torch.Tensor) -> None:
        block.rows[block.used : block.used + len(rows)] = rows
        block.used += len(rows)
        self._rows += len(rows)

    def _open_block(self, share: float) -> _Block | None:
        """One with room; None when the card has none for another."""
        if self._blocks and self._blocks[-1].room:
            return self._blocks[-1]
        rows = min(MOST_ROWS, max(FIRST_ROWS, self._rows))
        if not self._card.memory.book(rows * self._dimension * ELEMENT, share):
            return None
        try:
            with self._card.work():  # of the stream that uses it: another one's memory may still be written to
                self._blocks.append(_Block(self._card, rows, self._dimension))
        except torch.OutOfMemoryError:  # others have taken what was free; the booking went with the block
            return None
        return self._blocks[-1]


# ------------------------------------------------------------------------------------------------------------- a search


class CardView:
    """A `ScanView`."""

    def __init__(self, card: _Card, parts: Sequence[tuple[_Block, int]], lost: float, rest: View | None) -> None:
        self._card = card
        self._blocks = [block for block, _used in parts]  # what is booked stays booked while this lives
        with card.work():
            self._parts = [block.rows[:used] for block, used in parts]
        self._ends = np.cumsum([used for _block, used in parts], dtype=np.int64)
        self._rows = int(self._ends[-1]) if len(parts) else 0
        self._lost = lost
        self._rest = rest

    def rank(self, queries: Vectors, allowed: NDArray[np.bool_] | None) -> list[Ranking]:
        with self._card.work():
            halves, errors = self._queries(queries)
            found = [self._card.product(halves, part) for part in self._parts]
            scores = torch.cat(found, dim=1) if found else halves.new_zeros((len(queries), 0), dtype=torch.float32)
            if allowed is not None:
                mask = torch.tensor(~allowed[: self._rows]).to(self._card.device)
                scores.masked_fill_(mask, -torch.inf)
        ranked: list[Ranking] = [_Scored(self._card, row, error) for row, error in zip(scores, errors, strict=True)]
        if self._rest is None:
            return ranked
        others = self._rest.rank(queries, None if allowed is None else allowed[self._rows :])
        return [_Joined(one, other, self._rows) for one, other in zip(ranked, others, strict=True)]

    def rank_rows(self, query: NDArray[np.float32], rows: Positions) -> Ranking:
        here = int(np.searchsorted(rows, self._rows))
        with self._card.work():
            halves, (error,) = self._queries(query[None])
            found = [self._card.product(halves, part) for part in self._taken(rows[:here])]
            scores = torch.cat(found, dim=1)[0] if found else halves.new_zeros(0, dtype=torch.float32)
        ranked = _Scored(self._card, scores, error, rows[:here])
        if self._rest is None:
            return ranked
        return _Joined(ranked, self._rest.rank_rows(query, rows[here:] - self._rows), self._rows)

    def _taken(self, rows: Positions) -> list[torch.Tensor]:
        """The rows, which ascend, out of the blocks that hold some of them."""
        cuts = np.searchsorted(rows, self._ends)
        starts, firsts = np.insert(cuts, 0, 0)[:-1], np.insert(self._ends, 0, 0)[:-1]
        return [
            part[torch.tensor(rows[start:end] - first).to(self._card.device)]
            for part, start, end, first in zip(self._parts, starts, cuts, firsts, strict=True)
            if start < end
        ]

    def _queries(self, queries: Vectors) -> tuple[torch.Tensor, list[float]]:
        """In fp16, and for each by how much its scores can be wrong: |x.q - x'.q'| <= |x - x'| |q| + |x'| |q - q'|,
        and what adding up `dimension` products in fp32 may lose."""
        halves = queries.astype(np.float16)
        exact = queries.astype(np.float64)
        lengths = np.linalg.norm(exact, axis=1)
        lost = np.linalg.norm(exact - halves.astype(np.float64), axis=1)
        longest = 1.0 + 1e-6 + self._lost
        added = max(queries.shape[1], 16) * _EPSILON * longest * (lengths + lost)
        errors = self._lost * lengths + longest * lost + added
        return torch.tensor(halves).to(self._card.device), [float(error) for error in errors]


class _Scored:
    """The ranking of rows by scores that are wrong by at most `error`."""

    def __init__(self, card: _Card, scores: torch.Tensor, error: float, rows: Positions | None = None) -> None:
        self._card = card
        self._scores = scores
        self._error = error
        self._rows = rows

    def best(self, count: int) -> tuple[Positions, float]:
        count = min(count, len(self._scores))
        if not count:
            return np.empty(0, dtype=np.int64), -np.inf
        with self._card.work():
            last = min(1.0, float(torch.topk(self._scores, count, sorted=False).values.min()))
            least = np.nextafter(np.float32(last - 2 * self._error), np.float32(-np.inf))
            reach = self._scores > -torch.inf if last == -np.inf else self._scores >= float(least)
            chosen: Positions = torch.nonzero(reach).squeeze(1).cpu().numpy()
        floor = -np.inf if last == -np.inf else last - self._error
        return (chosen if self._rows is None else self._rows[chosen]), floor


class _Joined:
    """Two rankings of different rows, those of the second counted from `offset` on. A row that is left out of its own
    is below that one's floor, so below the higher of both; one of the best of all is one of the best of its own."""

    def __init__(self, one: Ranking, other: Ranking, offset: int) -> None:
        self._one = one
        self._other = other
        self._offset = offset

    def best(self, count: int) -> tuple[Positions, float]:
        first, floor = self._one.best(count)
        second, other_floor = self._other.best(count)
        return np.concatenate([first, second + self._offset]), max(floor, other_floor)

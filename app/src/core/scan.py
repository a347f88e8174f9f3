"""Exact search with vectors on the card: one pass in fp16, with a bound on the rounding error of a score.

The caller rescores the few rows that may be best with the exact vectors. Rows that do not fit into the card's memory
are scanned elsewhere. A search for which the card has no memory left is computed on the CPU. The interfaces are those
of `connector.stores.scan`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from .backends import DeviceFailed, OutOfMemory
from .backends.torch.process import device_errors_mapped
from .device import DeviceProfile
from .memory import T4MemoryManager

if TYPE_CHECKING:
    from connector.stores.scan import Positions, Ranking, ScanCopy, ScanView, VectorScan

# Rows of a collection's first and largest block. Each block is as large as all before it, so that small collections
# need little memory and growth copies nothing.
FIRST_ROWS, MOST_ROWS = 1024, 65_536
ELEMENT = 2  # bytes of a number in fp16
ROWS_AT_ONCE = 8192  # rows rounded together; their temporary memory is not booked
KEPT_SHARE = 2.0  # times the bookable share: a copy of kept rows exists beside the old copy for a while
_EPSILON = float(np.finfo(np.float32).eps)

Vectors = NDArray[np.float32]
# Queries (q, d) and rows (n, d), both fp16 -> dot products (q, n), summed in fp32.
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Result = TypeVar("Result")


class CardScan:
    """A `VectorScan` on one card; a row takes 2 x dimension bytes. `elsewhere` scans rows that do not fit.

    It has its own high-priority stream: a search waits for at most one kernel of a running batch.
    """

    def __init__(self, profile: DeviceProfile, memory: T4MemoryManager, elsewhere: VectorScan) -> None:
        self.device, self.memory, self.elsewhere = torch.device(profile.torch_name), memory, elsewhere
        self.failed = ""  # why the card computes nothing more
        on_cpu = self.device.type == "cpu"
        self._stream = None if on_cpu else torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self.product: Product = _product
        with self.work():
            rows = torch.randn(300, 512, generator=torch.Generator().manual_seed(3)).half().to(self.device)
            queries = rows[:3]  # their products with themselves are large, which shows rounding
            exact = queries.cpu().double()
            # Use cuBLAS' product with fp32 results if it exists and sums in fp32: it saves a copy in fp32.
            with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):
                wrong = (_mixed_product(queries, rows).cpu().double() - exact @ rows.cpu().double().T).abs()
                lengths = exact.norm(dim=1)[:, None] * rows.cpu().double().norm(dim=1)
                if bool((wrong <= lengths * 512 * _EPSILON).all()):
                    self.product = _mixed_product

    def copy(self, dimension: int) -> CardCopy:
        return CardCopy(self, dimension)

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Use the card's stream. Raises OutOfMemory, DeviceFailed."""
        beside = torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()
        try:
            with device_errors_mapped(self.device), torch.inference_mode(), beside:
                yield
        except DeviceFailed as error:
            self.failed = str(error)
            raise

    def search(self, work: Callable[[torch.device, Product], Result]) -> Result:
        """Do `work` on the card, or on the CPU if the card has no memory left for it: other programs may take it."""
        try:
            with self.work():
                return work(self.device, self.product)
        except OutOfMemory:
            with self.work():
                return work(torch.device("cpu"), _product)


def _product(queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.mm(queries.float(), rows.float().T)


def _mixed_product(queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.mm(queries, rows.T, out_dtype=torch.float32)


class _Block:
    """Space for rows on the card. The caller books its memory, which stays booked while the block is referenced."""

    def __init__(self, card: CardScan, rows: int, dimension: int) -> None:
        self._booking = weakref.finalize(self, card.memory.release, rows * dimension * ELEMENT)
        self._booking.atexit = False
        self.rows = torch.empty((rows, dimension), dtype=torch.float16, device=card.device)
        self.used = 0

    @property
    def room(self) -> int:
        return len(self.rows) - self.used


class CardCopy:
    """A `ScanCopy`: the first rows are on the card, those that do not fit are elsewhere."""

    def __init__(self, card: CardScan, dimension: int) -> None:
        self._card = card
        self._dimension = dimension
        self._blocks: list[_Block] = []
        self._lost = 0.0  # norm of the largest rounding error of a row
        self._rest: ScanCopy | None = None

    @property
    def rows_on_card(self) -> int:
        return sum(block.used for block in self._blocks)

    def append(self, vectors: Vectors) -> None:
        done = 0
        while done < len(vectors) and self._rest is None:
            block = self._open_block(1.0)
            if block is not None:
                some = vectors[done : done + min(block.room, ROWS_AT_ONCE)]
                with contextlib.suppress(OutOfMemory), self._card.work():  # treat as no room for a block
                    exact = torch.tensor(some).to(self._card.device)
                    rounded = exact.half()
                    lost = torch.linalg.vector_norm((exact - rounded.float()).double(), dim=1)
                    self._write(block, rounded)
                    self._lost = max(self._lost, float(lost.max()))
                    done += len(some)
                    continue
            self._rest = self._card.elsewhere.copy(self._dimension)
        if self._rest is not None and done < len(vectors):
            self._rest.append(vectors[done:])

    def kept(self, rows: NDArray[np.bool_]) -> CardCopy:
        try:
            return self._kept(rows)
        except OutOfMemory as error:
            raise MemoryError("the card's memory does not hold the rows that are kept") from error

    def _kept(self, rows: NDArray[np.bool_]) -> CardCopy:
        other = CardCopy(self._card, self._dimension)
        other._lost = self._lost
        start = 0
        for block in self._blocks:
            mask = torch.tensor(rows[start : start + block.used])
            start += block.used
            with self._card.work():
                kept = block.rows[: block.used][mask.to(self._card.device)]
                while len(kept):
                    target = other._open_block(KEPT_SHARE)
                    if target is None:
                        raise OutOfMemory("no block can be booked")
                    room = target.room
                    other._write(target, kept[:room])
                    kept = kept[room:]
        if self._rest is not None:
            other._rest = self._rest.kept(rows[start:])
        return other

    def view(self) -> CardView:
        parts = [(block, block.used) for block in self._blocks]
        rest = self._rest.view() if self._rest is not None else None
        return CardView(self._card, parts, self._lost, rest)

    def _write(self, block: _Block, rows: torch.Tensor) -> None:
        block.rows[block.used : block.used + len(rows)] = rows
        block.used += len(rows)

    def _open_block(self, share: float) -> _Block | None:
        """Return a block with room; None if the card has no room for another."""
        if self._blocks and self._blocks[-1].room:
            return self._blocks[-1]
        rows = min(MOST_ROWS, max(FIRST_ROWS, self.rows_on_card))
        if not self._card.memory.book(rows * self._dimension * ELEMENT, share):
            return None
        try:
            with self._card.work():  # on the stream that uses the block: others may still write to its memory
                self._blocks.append(_Block(self._card, rows, self._dimension))
        except OutOfMemory:  # other programs took the memory; the booking ended with the block
            return None
        return self._blocks[-1]


class CardView:
    """A `ScanView`."""

    def __init__(self, card: CardScan, parts: Sequence[tuple[_Block, int]], lost: float, rest: ScanView | None) -> None:
        self._card = card
        self._blocks = [block for block, _used in parts]  # keeps them booked while the view exists
        with card.work():
            self._parts = [block.rows[:used] for block, used in parts]
        self._ends = np.cumsum([used for _block, used in parts], dtype=np.int64)
        self._rows = int(self._ends[-1]) if len(parts) else 0
        self._lost = lost
        self._rest = rest

    def rank(self, queries: Vectors, allowed: NDArray[np.bool_] | None) -> list[Ranking]:
        halves, errors = self._queries(queries)

        def scan(device: torch.device, product: Product) -> torch.Tensor:
            asked = halves.to(device)
            found = [product(asked, part.to(device)) for part in self._parts]
            scores = torch.cat(found, dim=1) if found else asked.new_zeros((len(queries), 0), dtype=torch.float32)
            if allowed is not None:
                scores.masked_fill_(torch.tensor(~allowed[: self._rows]).to(device), -torch.inf)
            return scores

        scores = self._card.search(scan)
        ranked: list[Ranking] = [_Scored(self._card, row, error) for row, error in zip(scores, errors, strict=True)]
        if self._rest is None:
            return ranked
        others = self._rest.rank(queries, None if allowed is None else allowed[self._rows :])
        return [_Joined(one, other, self._rows) for one, other in zip(ranked, others, strict=True)]

    def rank_rows(self, query: NDArray[np.float32], rows: Positions) -> Ranking:
        here = int(np.searchsorted(rows, self._rows))
        halves, (error,) = self._queries(query[None])
        cuts = np.searchsorted(rows[:here], self._ends)
        starts, firsts = np.insert(cuts, 0, 0)[:-1], np.insert(self._ends, 0, 0)[:-1]

        def scan(device: torch.device, product: Product) -> torch.Tensor:
            asked = halves.to(device)
            found = [
                product(asked, part.to(device)[torch.tensor(rows[start:end] - first).to(device)])
                for part, start, end, first in zip(self._parts, starts, cuts, firsts, strict=True)
                if start < end
            ]
            return torch.cat(found, dim=1)[0] if found else asked.new_zeros(0, dtype=torch.float32)

        ranked = _Scored(self._card, self._card.search(scan), error, rows[:here])
        if self._rest is None:
            return ranked
        return _Joined(ranked, self._rest.rank_rows(query, rows[here:] - self._rows), self._rows)

    def _queries(self, queries: Vectors) -> tuple[torch.Tensor, list[float]]:
        """Return the queries in fp16 on the CPU, and the error bound of each one's scores: |x.q - x'.q'| <=
        |x - x'| |q| + |x'| |q - q'|, plus the rounding of a sum of `dimension` products in fp32."""
        halves = queries.astype(np.float16)
        exact = queries.astype(np.float64)
        lengths = np.linalg.norm(exact, axis=1)
        lost = np.linalg.norm(exact - halves.astype(np.float64), axis=1)
        longest = 1.0 + 1e-6 + self._lost
        added = max(queries.shape[1], 16) * _EPSILON * longest * (lengths + lost)
        errors = self._lost * lengths + longest * lost + added
        return torch.tensor(halves), [float(error) for error in errors]


class _Scored:
    """The ranking of rows by scores with an error of at most `error`."""

    def __init__(self, card: CardScan, scores: torch.Tensor, error: float, rows: Positions | None = None) -> None:
        self._card = card
        self._scores = scores
        self._error = error
        self._rows = rows

    def best(self, count: int) -> tuple[Positions, float]:
        count = min(count, len(self._scores))
        if not count:
            return np.empty(0, dtype=np.int64), -np.inf

        def choose(device: torch.device, _: Product) -> tuple[float, Positions]:
            scores = self._scores.to(device)
            last = min(1.0, float(torch.topk(scores, count, sorted=False).values.min()))
            least = np.nextafter(np.float32(last - 2 * self._error), np.float32(-np.inf))
            reach = scores > -torch.inf if last == -np.inf else scores >= float(least)
            return last, torch.nonzero(reach).squeeze(1).cpu().numpy()

        last, chosen = self._card.search(choose)
        floor = -np.inf if last == -np.inf else last - self._error
        return (chosen if self._rows is None else self._rows[chosen]), floor


class _Joined:
    """Two rankings of different rows; the second one's rows count from `offset`. A row left out by its ranking scores
    below that ranking's floor, so also below the higher one. The best rows overall are among the best of each."""

    def __init__(self, one: Ranking, other: Ranking, offset: int) -> None:
        self._one = one
        self._other = other
        self._offset = offset

    def best(self, count: int) -> tuple[Positions, float]:
        first, floor = self._one.best(count)
        second, other_floor = self._other.best(count)
        return np.concatenate([first, second + self._offset]), max(floor, other_floor)

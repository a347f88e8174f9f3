"""How many tokens go into one batch: from free memory and the cost of a token, halved when memory runs out. What else
lives on the device is booked here, so that batches leave it room.

Knows the device profile and numbers of bytes; never a model, never torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .device import ELEMENT_BYTES, Capability, DeviceProfile, Precision, detect

CPU_TOKENS = 1024
"""Measured with all-MiniLM-L6-v2 in fp32 on two cores, padded batches: 512 to 1024 tokens are fastest; 4096 lose 25 %
to padding and to the caches."""
LEAST_TOKENS = 64
MOST_TOKENS = 131_072
"""Of a batch on any card, so that every tensor of it has fewer than 2**31 numbers."""
TILE = 128
"""Rows and columns of the result that one multiprocessor works on at a time in cuBLAS' half-precision kernels."""
WAVES = 16
"""Tiles for each multiprocessor from which a card counts as full: the last, part-filled wave of 16 wastes 3 % on
average. More tokens would gain nothing and keep whoever comes meanwhile waiting."""
MULTIPROCESSORS: Mapping[Capability, int] = {
    (6, 0): 56,
    (6, 1): 20,
    (7, 0): 80,
    (7, 5): 40,
    (8, 0): 108,
    (8, 6): 72,
    (8, 9): 58,
    (9, 0): 132,
    (10, 0): 148,
    (12, 0): 170,
}
"""Of the data-centre card of each compute capability (P100, P4, V100, T4, A100, A10, L4, H100, B200; the RTX 5090 of
12.0), for a profile that does not say how many it has."""
OTHER_MULTIPROCESSORS = 80
RECOVER_AFTER = 64
"""Full batches without trouble after which a shrunken budget grows by an eighth."""
RETRY_AFTER = 16_384
"""Full batches without trouble after which a size that ran out of memory after having recovered is tried again."""
FULL_SHARE = 0.5
"""Of the budget, from which a batch says that the budget fits: every batch that the planner ended for want of room
holds more than that, for its texts come longest first."""
BOOKABLE_SHARE = 0.5
"""Of the usable memory, what others than batches may book at most."""
HEADROOM = 1.25
"""Times the measured cost of a token: the allocator rounds up to 2 MiB and leaves gaps between batches of other
sizes."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of an encoder that decide what a token costs."""

    hidden: int
    intermediate: int
    heads: int
    max_tokens: int

    def bytes_per_token(self, precision: Precision) -> int:
        """Upper estimate of the activations one padded token needs at once: hidden states (residual, norm, Q, K, V,
        output), the wide layer twice (before and after GELU), and one row of attention scores in case the kernel
        materialises them."""
        element = ELEMENT_BYTES[precision]
        return element * (8 * self.hidden + 2 * self.intermediate + self.heads * self.max_tokens)


@dataclass(frozen=True, slots=True)
class TokenCost:
    """What a batch takes of a card's memory at its peak: `fixed_bytes`, and so much for each token."""

    token_bytes: float
    fixed_bytes: int = 0

    def tokens_in(self, size: int) -> int:
        return max(0, int((size - self.fixed_bytes) / self.token_bytes))


PROBE_TOKENS = (8192, 24_576)
"""Of the two batches whose peaks tell what a token costs; both larger than any that is replayed from a CUDA graph,
whose memory was taken when it was recorded."""


def measured_cost(peak_bytes: Callable[[int], int], least_token_bytes: int) -> TokenCost | None:
    """The line through the peaks of a small and of a larger batch, and HEADROOM; `peak_bytes(tokens)` runs one and says
    by how much memory grew meanwhile. None where they tell nothing: the larger one took no more, or less than
    `least_token_bytes` for each token more, as when it found its memory among what was taken before."""
    small, large = PROBE_TOKENS
    peaks = peak_bytes(small), peak_bytes(large)
    slope = (peaks[1] - peaks[0]) / (large - small)
    if slope < least_token_bytes:
        return None
    return TokenCost(slope * HEADROOM, max(0, int(peaks[0] - slope * small)))


def full_tokens(profile: DeviceProfile, hidden: int) -> int:
    """Tokens from which the narrowest product of an encoder, (tokens, hidden), fills a card: WAVES tiles for each
    multiprocessor. T4, hidden size 384: 27,264; 1024: 10,240. H100: 90,112; 33,792."""
    known = profile.multiprocessors or MULTIPROCESSORS.get(profile.capability or (0, 0), OTHER_MULTIPROCESSORS)
    columns = -(-hidden // TILE)
    rows = known * WAVES / columns
    return max(LEAST_TOKENS, min(MOST_TOKENS, int(rows) * TILE))


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """`fraction` of the device's memory that this process may use, `reserve_bytes` left free for others."""

    fraction: float = 0.8
    reserve_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"memory fraction {self.fraction} is not in (0, 1]")
        if self.reserve_bytes < 0:
            raise ValueError(f"memory reserve {self.reserve_bytes} is negative")


class T4MemoryManager:
    """The token budget of a device. Thread-safe."""

    def __init__(
        self,
        profile: DeviceProfile | None = None,
        limits: MemoryLimits | None = None,
        *,
        free_bytes: int = 0,
        used_bytes: int = 0,
    ) -> None:
        """Without `profile`, as the guides write it, that of this machine: a usable GPU, else the CPU. `free_bytes`:
        what batches could take now, model already loaded; 0 takes the total. `used_bytes`: what this process has taken
        before, its model above all; that counts against its fraction."""
        self._profile = profile or detect()
        self._limits = limits or MemoryLimits()
        self._free = free_bytes or self._profile.memory_bytes
        self._used = used_bytes
        self._lock = threading.RLock()  # `release` may be called by a finalizer, within anything
        self._most = CPU_TOKENS
        self._budget = CPU_TOKENS
        self._shrunk: int | None = None
        """The budget that memory running out has led to, until it has recovered."""
        self._ceiling: int | None = None
        """Below a size that ran out of memory although smaller ones had gone well for long: it is no passing
        trouble."""
        self._recovering = False
        self._good_batches = 0
        self._out_of_memory = 0
        self._booked = 0
        self._cost: TokenCost | None = None
        self._full = MOST_TOKENS

    @property
    def usable_bytes(self) -> int:
        """What batches may use: free memory, within the fraction of the total, less the reserve and what is booked."""
        return max(0, self._unbooked_bytes - self._booked)

    @property
    def _unbooked_bytes(self) -> int:
        allowed = int(self._profile.memory_bytes * self._limits.fraction) - self._used
        return max(0, min(allowed, self._free) - self._limits.reserve_bytes)

    @property
    def booked_bytes(self) -> int:
        return self._booked

    def book(self, size: int, times: float = 1.0) -> bool:
        """Set `size` bytes of the device aside for something that stays there, such as a matrix to search; batches are
        planned for what is left. False, and nothing booked, when all bookings were more than `times` their share."""
        if size < 0:
            raise ValueError(f"cannot book {size} bytes")
        with self._lock:
            if self._booked + size > self._unbooked_bytes * BOOKABLE_SHARE * times:
                return False
            self._booked += size
            self._plan_again()
            return True

    def release(self, size: int) -> None:
        """Give booked bytes back."""
        with self._lock:
            if not 0 <= size <= self._booked:
                raise ValueError(f"cannot release {size} bytes of {self._booked} that are booked")
            self._booked -= size
            self._plan_again()

    def _plan_again(self) -> None:
        """A budget that memory running out has shrunk stays shrunk."""
        if self._cost:
            self._most = self._affordable(self._cost)
            self._budget = self._most if self._shrunk is None else min(self._shrunk, self._most)

    def _affordable(self, cost: TokenCost) -> int:
        return max(LEAST_TOKENS, min(self._full, cost.tokens_in(self.usable_bytes)))

    @property
    def token_budget(self) -> int:
        with self._lock:
            return self._budget

    @property
    def planned_tokens(self) -> int:
        """The budget as it is while memory does not run out."""
        with self._lock:
            return self._most

    @property
    def out_of_memory_count(self) -> int:
        return self._out_of_memory

    def plan_for(self, shape: ModelShape, precision: Precision, measured: TokenCost | None = None) -> int:
        """Set the budget for a model and return it: what fits, up to what fills the card. Without a `measured` cost an
        upper estimate counts. On a CPU caches decide, not memory."""
        with self._lock:
            self._cost = None
            if self._profile.kind == "cuda":
                self._cost = measured or TokenCost(shape.bytes_per_token(precision))
                self._full = full_tokens(self._profile, shape.hidden)
            self._most = self._budget = self._affordable(self._cost) if self._cost else CPU_TOKENS
            self._shrunk = self._ceiling = None
            self._recovering = False
            return self._budget

    def shrink(self, failed_tokens: int) -> int:
        """A batch of `failed_tokens` ran out of memory: halve, and return the new budget. What was planned before the
        budget shrank says nothing of the new one: of several such batches only the first halves it."""
        with self._lock:
            self._out_of_memory += 1
            self._good_batches = 0
            if self._recovering and failed_tokens <= self._budget:
                self._ceiling = max(LEAST_TOKENS, failed_tokens - failed_tokens // 8)
            self._recovering = False
            self._budget = self._shrunk = max(LEAST_TOKENS, min(self._budget, failed_tokens // 2))
            return self._budget

    def succeeded(self, tokens: int) -> None:
        """A batch of so many tokens went well; after enough that were full a shrunken budget recovers a little. It
        stops below a size that failed after such a recovery, until RETRY_AFTER more."""
        with self._lock:
            if self._budget >= self._most and self._ceiling is None:
                self._shrunk = None if self._shrunk is None or self._shrunk <= self._most else self._shrunk
                return
            if tokens < self._budget * FULL_SHARE:
                return
            self._good_batches += 1
            if self._ceiling is not None and self._budget >= min(self._ceiling, self._most):
                if self._good_batches >= RETRY_AFTER:
                    self._good_batches, self._ceiling = 0, None
            elif self._good_batches >= RECOVER_AFTER:
                self._good_batches = 0
                self._grow()

    def _grow(self) -> None:
        most = self._most if self._ceiling is None else min(self._most, self._ceiling)
        self._budget = self._shrunk = min(most, self._budget + max(1, self._budget // 8))
        self._recovering = True

    def calculate_optimal_batch_size(
        self,
        input_size_per_sample: int,
        output_size_per_sample: int,
        processing_size_per_sample: int | None = None,
        min_batch: int = 1,
        max_batch: int = 64,
    ) -> int:
        """Samples that fit into the usable memory, sizes in bytes per sample.

        Without `processing_size_per_sample` twice input and output is assumed. The result is within the bounds even
        where memory is unknown or too small for `min_batch`; a multiple of 8 from 8 up, so that tensor cores are full.
        """
        if min(input_size_per_sample, output_size_per_sample, processing_size_per_sample or 0) < 0:
            raise ValueError("sizes per sample must not be negative")
        if not 1 <= min_batch <= max_batch:
            raise ValueError(f"min_batch {min_batch} and max_batch {max_batch} must satisfy 1 <= min <= max")
        moved = input_size_per_sample + output_size_per_sample
        processing = 2 * moved if processing_size_per_sample is None else processing_size_per_sample
        fitting = min(max_batch, self.usable_bytes // max(1, moved + processing))
        aligned = fitting - fitting % 8 if fitting >= 8 else fitting
        return max(min_batch, aligned)

"""How many tokens go into one batch: from free memory and the cost of a token, halved when memory runs out. What else
lives on the device is booked here, so that batches leave it room.

Knows the device profile and numbers of bytes; never a model, never torch.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from .device import ELEMENT_BYTES, DeviceProfile, Precision

CPU_TOKENS = 1024
"""Measured with all-MiniLM-L6-v2 in fp32 on two cores, padded batches: 512 to 1024 tokens are fastest; 4096 lose 25 %
to padding and to the caches."""
MOST_TOKENS = 65_536
"""More tokens in a batch keep no GPU busier and only add padding."""
LEAST_TOKENS = 64
RECOVER_AFTER = 64
"""Batches without trouble after which a shrunken budget grows by an eighth."""
BOOKABLE_SHARE = 0.5
"""Of the usable memory, what others than batches may book at most."""


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

    def __init__(self, profile: DeviceProfile, limits: MemoryLimits | None = None, *, free_bytes: int = 0) -> None:
        """`free_bytes`: what the driver reports as free now, model already loaded; 0 takes the total."""
        self._profile = profile
        self._limits = limits or MemoryLimits()
        self._free = free_bytes or profile.memory_bytes
        self._lock = threading.RLock()  # `release` may be called by a finalizer, within anything
        self._most = CPU_TOKENS
        self._budget = CPU_TOKENS
        self._shrunk: int | None = None
        """The budget that memory running out has led to, until it has recovered."""
        self._good_batches = 0
        self._out_of_memory = 0
        self._booked = 0
        self._token_bytes = 0

    @property
    def usable_bytes(self) -> int:
        """What batches may use: free memory, within the fraction of the total, less the reserve and what is booked."""
        return max(0, self._unbooked_bytes - self._booked)

    @property
    def _unbooked_bytes(self) -> int:
        allowed = int(self._profile.memory_bytes * self._limits.fraction)
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
        if self._token_bytes:
            self._most = self._affordable()
            self._budget = self._most if self._shrunk is None else min(self._shrunk, self._most)

    def _affordable(self) -> int:
        return max(LEAST_TOKENS, min(MOST_TOKENS, self.usable_bytes // self._token_bytes))

    @property
    def token_budget(self) -> int:
        with self._lock:
            return self._budget

    @property
    def out_of_memory_count(self) -> int:
        return self._out_of_memory

    def plan_for(self, shape: ModelShape, precision: Precision) -> int:
        """Set the budget for a model and return it. On a CPU caches decide, not memory."""
        with self._lock:
            self._token_bytes = shape.bytes_per_token(precision) if self._profile.kind == "cuda" else 0
            self._most = self._budget = self._affordable() if self._token_bytes else CPU_TOKENS
            self._shrunk = None
            return self._budget

    def shrink(self, failed_tokens: int) -> int:
        """A batch of `failed_tokens` ran out of memory: halve, and return the new budget."""
        with self._lock:
            self._out_of_memory += 1
            self._good_batches = 0
            self._budget = self._shrunk = max(LEAST_TOKENS, min(self._budget, failed_tokens) // 2)
            return self._budget

    def succeeded(self) -> None:
        """A batch went well; after enough of them a shrunken budget recovers a little."""
        with self._lock:
            if self._budget >= self._most:
                self._shrunk = None if self._shrunk is None or self._shrunk <= self._most else self._shrunk
                return
            self._good_batches += 1
            if self._good_batches >= RECOVER_AFTER:
                self._good_batches = 0
                self._budget = self._shrunk = min(self._most, self._budget + max(1, self._budget // 8))

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

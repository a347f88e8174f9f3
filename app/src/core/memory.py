"""What this process holds on a device, and the token budget of a batch, from the rest and the memory cost of a token.

The budget is halved when memory runs out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from .device import ELEMENT_BYTES, DeviceProfile, Precision, detect

# all-MiniLM-L6-v2, fp32, two cores, padded batches: 512 to 1024 tokens are fastest; 4096 lose 25 % (padding, caches).
CPU_TOKENS = 1024
# On the packed path: twice as many rows load each weight half as often (measured 2 to 13 % faster).
PACKED_CPU_TOKENS = 2048
LEAST_TOKENS = 64
MOST_TOKENS = 131_072  # on any card, so that every tensor has fewer than 2**31 numbers
TILE = 128  # rows and columns that one multiprocessor computes at a time in cuBLAS' half-precision kernels
# Tiles per multiprocessor from which a card counts as full: the last, partly filled wave wastes 3 % on average. Larger
# batches gain nothing and delay other requests.
WAVES = 16
OTHER_MULTIPROCESSORS = 80  # assumed if the profile does not give the number
RECOVER_AFTER = 64  # successful full batches after which a reduced budget grows by an eighth
# Share of the budget from which a batch counts as full. Batches that the planner closed for lack of room exceed it,
# because texts come longest first.
FULL_SHARE = 0.5
BOOKABLE_SHARE = 0.5  # of the usable memory, for all bookings together
HEADROOM = 1.25  # times the measured cost: the allocator rounds up to 2 MiB and leaves gaps between batches


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of an encoder that determine the memory cost of a token."""

    hidden: int
    intermediate: int
    heads: int
    max_tokens: int

    def bytes_per_token(self, precision: Precision) -> int:
        """Return an upper estimate of one padded token's activations: hidden states (residual, norm, Q, K, V, output),
        the wide layer before and after GELU, and a row of attention scores if the kernel materialises them."""
        element = ELEMENT_BYTES[precision]
        return element * (8 * self.hidden + 2 * self.intermediate + self.heads * self.max_tokens)


# Peak memory of a batch on a card: bytes for each token, and fixed bytes.
TokenCost = tuple[float, int]
PROBE_TOKENS = (8192, 24_576)  # of the two trial batches


def measured_cost(peak_bytes: Callable[[int], int], least_token_bytes: int, times: int = 1) -> TokenCost | None:
    """Return slope and offset of the line through the peaks of a small and a large batch, times HEADROOM.
    `peak_bytes(tokens)` runs a batch and returns how many bytes memory grew; `times`: of PROBE_TOKENS. Returns None if
    the slope is below `least_token_bytes`, because memory was reused."""
    small, large = (times * tokens for tokens in PROBE_TOKENS)
    peaks = peak_bytes(small), peak_bytes(large)
    slope = (peaks[1] - peaks[0]) / (large - small)
    if slope < least_token_bytes:
        return None
    return slope * HEADROOM, max(0, int((peaks[0] - slope * small) * HEADROOM))


def full_tokens(profile: DeviceProfile, hidden: int) -> int:
    """Return the tokens from which an encoder's narrowest product, (tokens, hidden), fills a card: WAVES tiles for each
    multiprocessor. Hidden size 384 or 1024: 27,264 or 10,240 on a T4, 90,112 or 33,792 on an H100."""
    rows = (profile.multiprocessors or OTHER_MULTIPROCESSORS) * WAVES / -(-hidden // TILE)
    return max(LEAST_TOKENS, min(MOST_TOKENS, int(rows) * TILE))


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """`fraction`: share of the device's memory for this process; `reserve_bytes`: memory left to other programs."""

    fraction: float = 0.8
    reserve_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"memory fraction {self.fraction} is not in (0, 1]")
        if self.reserve_bytes < 0:
            raise ValueError(f"memory reserve {self.reserve_bytes} is negative")


class DeviceMemory:
    """The memory of one device, shared by all that this process loads there. Thread-safe.

    Models are held: they need their memory. A search's data is booked: it can stay elsewhere. The rest is for batches,
    in equal shares for all engines, because they compute at the same time. `limits` are those of the last load.
    """

    def __init__(self, profile: DeviceProfile) -> None:
        self.profile = profile
        self.limits = MemoryLimits()
        self.room = profile.memory_bytes  # free memory and what this process has, as measured at the last load
        self.held_bytes = 0
        self.booked_bytes = 0
        self.managers: weakref.WeakSet[T4MemoryManager] = weakref.WeakSet()
        self.lock = threading.RLock()  # a finalizer may call `release` at any point

    @property
    def unbooked_bytes(self) -> int:
        """Return the memory within the fraction, less models and reserve."""
        allowed = min(int(self.profile.memory_bytes * self.limits.fraction), self.room)
        return max(0, allowed - self.held_bytes - self.limits.reserve_bytes)

    def hold(self, owner: object, size: int) -> Callable[[], object]:
        """Count `size` bytes of a loaded model until `owner` is gone or the result is called."""
        self._hold(size)
        release = weakref.finalize(owner, self._hold, -size)
        release.atexit = False
        return release

    def _hold(self, size: int) -> None:
        with self.lock:
            self.held_bytes += size
            self.plan()

    def book(self, size: int, times: float = 1.0) -> bool:
        """Reserve `size` bytes, such as for a matrix to search, and plan batches for the rest. Return False and book
        nothing if all bookings would exceed `times` x BOOKABLE_SHARE."""
        with self.lock:
            if self.booked_bytes + size > self.unbooked_bytes * BOOKABLE_SHARE * times:
                return False
            self.booked_bytes += size
            self.plan()
            return True

    def release(self, size: int) -> None:
        """Release booked bytes."""
        with self.lock:
            self.booked_bytes -= size
            self.plan()

    def plan(self) -> None:
        """Plan the budgets of all engines again. Called under the lock."""
        for manager in list(self.managers):
            manager.plan_again()


_devices: dict[str, DeviceMemory] = {}


def memory_of(profile: DeviceProfile) -> DeviceMemory:
    """Return the memory of a device of this process."""
    return _devices.setdefault(profile.torch_name, DeviceMemory(profile))


class T4MemoryManager:
    """The token budget of one engine. Thread-safe. `book` and `release` are those of its device."""

    def __init__(
        self,
        profile: DeviceProfile | None = None,
        limits: MemoryLimits | None = None,
        *,
        free_bytes: int = 0,
        used_bytes: int = 0,
        device: DeviceMemory | None = None,
    ) -> None:
        """Without `profile`, detect this machine's device: a usable GPU, else the CPU. `free_bytes`: free memory after
        the model was loaded; 0 means the total. `used_bytes`: what the model takes. `device`: the memory shared with
        other engines; None: this engine has the device alone."""
        self.device = device or DeviceMemory(profile or detect())
        self.book, self.release = self.device.book, self.device.release
        self._profile = self.device.profile
        self._lock = self.device.lock
        self._cpu_tokens = CPU_TOKENS
        self.token_budget = CPU_TOKENS
        self.planned_tokens = CPU_TOKENS  # the budget without reductions after OutOfMemory
        self._shrunk: int | None = None  # the reduced budget, until it has recovered
        self._good_batches = 0
        self.out_of_memory_count = 0
        self._cost: TokenCost | None = None
        self._full = MOST_TOKENS
        with self._lock:
            self.device.limits = limits or self.device.limits
            self.device.managers.add(self)
            self._free_model = self.device.hold(self, used_bytes)
            if free_bytes:
                self.device.room = free_bytes + self.device.held_bytes + self.device.booked_bytes
            self.device.plan()

    def close(self) -> None:
        """Leave the model's memory and this engine's share to the others."""
        with self._lock:
            self.device.managers.discard(self)
            self._free_model()

    @property
    def usable_bytes(self) -> int:
        """Return this engine's memory for batches: its share of what models, reserve and bookings leave."""
        with self._lock:
            left = max(0, self.device.unbooked_bytes - self.device.booked_bytes)
            return left // max(1, len(self.device.managers))

    def plan_again(self) -> None:
        """Plan the budget for what is left now; a reduced budget stays reduced."""
        self.planned_tokens = self._cpu_tokens
        if self._cost is not None:
            token_bytes, fixed_bytes = self._cost
            fitting = int((self.usable_bytes - fixed_bytes) / token_bytes)
            self.planned_tokens = max(LEAST_TOKENS, min(self._full, fitting))
        self.token_budget = self.planned_tokens if self._shrunk is None else min(self._shrunk, self.planned_tokens)

    def plan_for(
        self, shape: ModelShape, precision: Precision, measured: TokenCost | None = None, *, packed: bool = False
    ) -> int:
        """Set and return the budget for a model: the tokens that fit, up to those that fill the card. Without
        `measured` it uses an upper estimate. On a CPU the budget is CPU_TOKENS, or PACKED_CPU_TOKENS."""
        with self._lock:
            self._cpu_tokens = PACKED_CPU_TOKENS if packed else CPU_TOKENS
            self._cost = self._shrunk = None
            if self._profile.kind == "cuda":
                self._cost = measured or (shape.bytes_per_token(precision), 0)
                self._full = full_tokens(self._profile, shape.hidden)
            self.plan_again()
            return self.token_budget

    def shrink(self, failed_tokens: int) -> int:
        """Halve the budget after a batch of `failed_tokens` ran out of memory, and return the new budget. Of several
        batches planned with the same budget only the first halves it."""
        with self._lock:
            self.out_of_memory_count += 1
            self._good_batches = 0
            self.token_budget = self._shrunk = max(LEAST_TOKENS, min(self.token_budget, failed_tokens // 2))
            return self.token_budget

    def succeeded(self, tokens: int) -> None:
        """Count a successful batch. After RECOVER_AFTER full ones a reduced budget grows by an eighth."""
        with self._lock:
            most, budget = self.planned_tokens, self.token_budget
            if self._shrunk is None or budget >= most or tokens < budget * FULL_SHARE:
                return
            self._good_batches += 1
            if self._good_batches >= RECOVER_AFTER:
                self._good_batches = 0
                grown = budget + max(1, budget // 8)
                self.token_budget, self._shrunk = min(grown, most), grown if grown < most else None

    def calculate_optimal_batch_size(
        self,
        input_size_per_sample: int,
        output_size_per_sample: int,
        processing_size_per_sample: int | None = None,
        min_batch: int = 1,
        max_batch: int = 64,
    ) -> int:
        """Return how many samples fit into the usable memory, within the bounds; from 8 on a multiple of 8, which fills
        tensor cores. Sizes are bytes per sample; `processing_size_per_sample` defaults to twice input and output."""
        moved = input_size_per_sample + output_size_per_sample
        processing = 2 * moved if processing_size_per_sample is None else processing_size_per_sample
        fitting = min(max_batch, self.usable_bytes // max(1, moved + processing))
        return max(min_batch, fitting - fitting % 8 if fitting >= 8 else fitting)

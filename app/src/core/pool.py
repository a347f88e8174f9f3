"""One model on several devices of this machine, an engine for each, behind the interface of one engine."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from .backends import DeviceFailed, DeviceUnavailable, EngineClosed, InputType, NonFinite, Vectors
from .engine import Device, EmbeddingEngine, Engine, divided, strings
from .queue import SMALL_SHARE, WINDOW, EngineOverloaded, EngineStats, Lane, Watcher, WorkerDied

# A large call is divided into parts, but not below the share of a batch from which a request counts as bulk work.
# Several parts for each device even out devices of different speed; IN_FLIGHT of a call wait at each. A part of a very
# large call fills the window of texts that a queue sorts by length.
PARTS, IN_FLIGHT = 4, 2
CHARACTERS = 4  # of a token, about
MEMBER_LOST = (DeviceFailed, EngineClosed)  # such a member gets no more work, and neither does one that says `failed`
# Errors that say nothing about the texts: another member computes them.
OF_MEMBER = (*MEMBER_LOST, WorkerDied, EngineOverloaded)

_log = logging.getLogger(__name__)


class Member(Device, Protocol):
    """A loaded engine with its own queue, in this process (EmbeddingEngine) or elsewhere. Thread-safe.

    Its methods return at once and do not raise because of a lost connection: the future has the error, or `failed` says
    why it computes nothing more. WorkerDied: it died and comes back by itself; work that it gets until then waits.
    """

    fingerprint: str

    def submit(
        self,
        texts: Sequence[str],
        lane: Lane | None,
        *,
        input_type: InputType,
        normalize: bool,
        counted: Callable[[list[int]], None] | None,
    ) -> Future[Vectors]:
        """As `Engine.submit`; errors may also be the future's. The texts of a part are distinct."""

    def configure_queue(self, *, max_wait: float | None = None, watcher: Watcher | None = None) -> None: ...

    def check_room(self, texts: Sequence[str]) -> None: ...

    @property
    def token_budget(self) -> int: ...

    @property
    def planned_tokens(self) -> int: ...

    def stats(self) -> EngineStats: ...

    def stalled(self) -> float: ...

    @property
    def deaths(self) -> int: ...

    @property
    def failed(self) -> str: ...

    def close(self) -> None: ...


class EnginePool(Engine):
    """Gives each part of a call to the member with the fewest waiting characters.

    Runs on as long as one member works; a member that has failed gets no work again. A call is refused if all members
    refuse it. Each member has a queue of its own.
    """

    def __init__(self, first: EmbeddingEngine, members: Sequence[Member]) -> None:
        """`first` counts, splits and describes the model. It may be a member, or an engine without weights. The pool
        closes both. Raises DeviceUnavailable if a member's fingerprint differs from that of `first`."""
        for number, member in enumerate(members, 1):
            if member.fingerprint != first.fingerprint:
                raise DeviceUnavailable(
                    f"engine {number} of {len(members)} ({member.profile.name}) would compute vectors that cannot be "
                    f"compared: its fingerprint is {member.fingerprint}, not {first.fingerprint}; give all engines the "
                    "same model files and settings, or name one device"
                )
        self._members = tuple(members)
        self._first = first
        for name in Engine.__annotations__:
            setattr(self, name, getattr(members[0] if name in Device.__annotations__ else first, name))
        self._lock = threading.RLock()
        self._waiting = dict.fromkeys(self.members, 0)  # characters
        self._lost: dict[Member, str] = {}
        self._counts = Counter[str]()
        self._watcher = Watcher()
        self._closed = False

    # -- vectors

    def _computed(
        self, texts: Sequence[str], lane: Lane | None, input_type: InputType, *, counted: bool
    ) -> tuple[Vectors, NDArray[np.intp]]:
        self._check_open()
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        counts = np.zeros(len(texts), dtype=np.intp)
        parts = deque(self._parts(texts))
        lane = lane or ("bulk" if len(parts) > 1 else None)
        pending: dict[Future[Vectors], slice] = {}
        try:
            while parts or pending:
                while parts and len(pending) < IN_FLIGHT * len(self._working()):
                    part = slice(*parts.popleft())
                    count = partial(counts.__setitem__, part) if counted else None
                    pending[_Part(self, texts[part], lane, input_type, False, count).queue()] = part
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    part = pending.pop(future)
                    try:
                        vectors[part] = future.result()
                    except NonFinite as error:  # of all parts; the caller raises it with positions in the call
                        vectors[part] = 1
                        vectors[part][list(error.indices)] = np.nan
        finally:
            for future in pending:
                future.cancel()
        return vectors, counts

    def submit(
        self,
        texts: Sequence[str],
        lane: Lane | None = None,
        *,
        input_type: InputType = "document",
        normalize: bool = True,
        counted: Callable[[list[int]], None] | None = None,
    ) -> Future[Vectors]:
        """As `Engine.submit`; the call goes whole to one member."""
        self._check_open()
        future = _Part(self, strings(texts), lane, input_type, normalize, counted).queue()
        self._count_texts(len(texts), len(set(texts)))
        return future

    def _parts(self, texts: Sequence[str]) -> list[tuple[int, int]]:
        """Return the start and end of each part of a call."""
        total, batch = sum(map(len, texts)), CHARACTERS * self._working()[0].planned_tokens
        least = int(SMALL_SHARE * batch)
        each = min(max(least, -(-total // (PARTS * len(self._working())))), WINDOW * batch)
        return divided(texts, each, least=each) if total >= 2 * least else [(0, len(texts))][: len(texts)]

    # -- members

    @property
    def members(self) -> Sequence[Member]:
        return self._members

    @property
    def failures(self) -> list[str]:
        return list(map(self._failure, self.members))

    @property
    def failed(self) -> str:
        return "; ".join(failures) if all(failures := self.failures) else ""

    def _failure(self, member: Member) -> str:
        return self._lost.get(member) or member.failed

    def _working(self) -> list[Member]:
        """Return the members that can compute. Raises DeviceFailed if there is none."""
        working = [member for member in self.members if not self._failure(member)]
        if not working:
            raise DeviceFailed(self.failed)
        return working

    def reserve(self, size: int, lane: Lane | None, tried: Collection[Member]) -> Member | None:
        """Return the member with the least work that was not `tried`, and count `size` characters more; None if there
        is none. Raises DeviceFailed if no member works."""
        with self._lock:
            members = [member for member in self._working() if member not in tried]
            # Of equal ones, bulk work goes to a child process, because the first member tokenises in the caller's
            # thread; a search goes to the first one, because the way to a child takes longer.
            members = members[::-1] if lane == "bulk" else members
            member = min(members, key=self._waiting.__getitem__, default=None)
            if member is not None:
                self._waiting[member] += size
        return member

    def release(self, member: Member, size: int, error: BaseException | None = None) -> bool:
        """Count `size` characters less; return whether another member should compute them because of this error."""
        with self._lock:
            self._waiting[member] -= size
            if self._closed or not isinstance(error, OF_MEMBER):
                return False
            lost = member not in self._lost and (isinstance(error, MEMBER_LOST) or bool(member.failed))
            if lost:
                self._lost[member] = str(error)
        if lost:
            _log.error("%s computes nothing more on %s: %s", self.model, member.profile.torch_name, error)
        return True

    def refuse(self, error: EngineOverloaded) -> NoReturn:
        """Raise the error of a call that all members have refused."""
        self._watcher.refused()
        raise error

    # -- tokens

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return self._first.count_tokens(texts)

    def piece_spans(self, text: str, max_tokens: int, overlap: int) -> Iterator[tuple[int, int]]:
        return self._first.piece_spans(text, max_tokens, overlap)

    # -- the queues

    def configure_queue(self, *, max_wait: float | None = None, watcher: Watcher | None = None) -> None:
        self._watcher = watcher or self._watcher
        for member in self.members:
            member.configure_queue(max_wait=max_wait, watcher=_ButRefusals(self._watcher))

    def check_room(self, texts: Sequence[str]) -> None:
        crowded = None
        for member in self._working():
            try:
                return member.check_room(texts)
            except EngineOverloaded as error:
                crowded = error
        assert crowded is not None
        self.refuse(crowded)

    @property
    def token_budget(self) -> int:
        """Return the sum of the members' budgets."""
        return sum(member.token_budget for member in self.members)

    @property
    def planned_tokens(self) -> int:
        return sum(member.planned_tokens for member in self.members)

    def stats(self) -> EngineStats:
        """Return the sums over all members; `texts` as the callers gave them."""
        each = [member.stats() for member in self.members]
        sums = {item.name: sum(getattr(stats, item.name) for stats in each) for item in fields(EngineStats)}
        return replace(EngineStats(**sums), **{name: self._counts[name] for name in ("texts", "computed_texts")})

    def _count_texts(self, texts: int, computed: int) -> None:
        with self._lock:
            self._counts.update(texts=texts, computed_texts=computed)

    def stalled(self) -> float:
        """Return the longest time of a working member."""
        return max((member.stalled() for member in self.members if not self._failure(member)), default=0.0)

    @property
    def deaths(self) -> int:
        return max((member.deaths for member in self.members if not self._failure(member)), default=0)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed(f"the engine of {self.model} is closed")

    def close(self) -> None:
        self._closed = True
        for member in self.members:
            member.close()
        self._first.close()


@dataclass(eq=False, slots=True)
class _Part:
    """Texts for one member, or for another one if it cannot compute them."""

    pool: EnginePool
    texts: Sequence[str]
    lane: Lane | None
    input_type: InputType
    normalize: bool
    counted: Callable[[list[int]], None] | None  # None after it was called
    answer: Future[Vectors] = field(default_factory=Future)
    tried: list[Member] = field(default_factory=list)

    def queue(self, error: BaseException | None = None) -> Future[Vectors]:
        """Queue the texts at the member with the least work. Raises its errors; `error` if all were tried."""
        size = sum(map(len, self.texts)) + len(self.texts)
        while (member := self.pool.reserve(size, self.lane, self.tried)) is not None:
            try:
                future = member.submit(
                    self.texts,
                    self.lane,
                    input_type=self.input_type,
                    normalize=self.normalize,
                    counted=None if self.counted is None else self._count,
                )
            except BaseException as refused:
                if not self.pool.release(member, size, refused):
                    raise
                self.tried.append(member)
                error = refused
            else:
                self.answer.add_done_callback(partial(_cancel, future))
                future.add_done_callback(partial(self._answered, member, size))
                return self.answer
        assert error is not None
        if isinstance(error, EngineOverloaded):
            self.pool.refuse(error)
        raise error

    def _count(self, counts: list[int]) -> None:
        counted, self.counted = self.counted, None
        assert counted is not None
        counted(counts)

    def _answered(self, member: Member, size: int, future: Future[Vectors]) -> None:
        error = None if future.cancelled() else future.exception()
        if self.pool.release(member, size, error):
            self.tried.append(member)
            try:
                self.queue(error)
                return
            except Exception as another:
                error = another
        if not future.cancelled() and self.answer.set_running_or_notify_cancel():
            if error is None:
                self.answer.set_result(future.result())
            else:
                self.answer.set_exception(error)


class _ButRefusals(Watcher):
    """Passes on all events but refusals: another member may accept the call."""

    def __init__(self, watcher: Watcher) -> None:
        for name in ("queued", "began", "batch"):
            setattr(self, name, getattr(watcher, name))


def _cancel(future: Future[Vectors], answer: Future[Vectors]) -> None:
    if answer.cancelled():
        future.cancel()

"""One model on several devices of this machine, an engine for each, behind the interface of one engine."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from .backends import DeviceFailed, DeviceUnavailable, EngineClosed, InputType, NonFinite, Vectors
from .engine import Device, EmbeddingEngine, Engine, divided, strings
from .queue import SMALL_SHARE, WINDOW, EngineOverloaded, EngineStats, Lane, Watcher, WorkerDied

# A large call is divided into blocks, but not below the share of a batch from which a request counts as bulk work.
# BLOCKS for each device even out devices of different speed; IN_FLIGHT of all bulk calls are at each. A block of a very
# large call fills the window of texts that a queue sorts by length.
BLOCKS, IN_FLIGHT = 4, 2
CHARACTERS = 4  # of a token, about
# A block that killed DEATHS members is halved until the texts that do it are found. More than ROUNDS deaths in a call,
# about ten such texts among 500, have another reason. A text waits at most ALONE_SECONDS until a member is idle.
DEATHS, ROUNDS, ALONE_SECONDS = 2, 100, 60.0
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

    @property
    def ready(self) -> bool:
        """Whether it computes at once; False until it is back after a death. Then others get its work."""

    def submit(
        self,
        texts: Sequence[str],
        lane: Lane | None,
        *,
        input_type: InputType,
        normalize: bool,
        counted: Callable[[list[int]], None] | None,
    ) -> Future[Vectors]:
        """As `Engine.submit`; errors may also be the future's. The texts of a block are distinct."""


class EnginePool(Engine):
    """Gives each block of a call to the member with the fewest waiting characters.

    Runs on as long as one member works; a member that has failed gets no work again. A call is refused if all members
    refuse it. Each member has a queue of its own. Blocks of a member that died go to others. A text of bulk work that
    kills members while they compute nothing else has no vector (NonFinite).
    """

    def __init__(
        self, first: EmbeddingEngine, members: Sequence[Member], blocks: int = BLOCKS, in_flight: int = IN_FLIGHT
    ) -> None:
        """`first` counts, splits and describes the model. It may be a member, or an engine without weights. The pool
        closes both. `blocks`: of a large call for each member; `in_flight`: of all bulk calls for each member, on
        average. Raises DeviceUnavailable if a member's fingerprint differs from that of `first`."""
        for number, member in enumerate(members, 1):
            if member.fingerprint != first.fingerprint:
                raise DeviceUnavailable(
                    f"engine {number} of {len(members)} ({member.profile.name}) would compute vectors that cannot be "
                    f"compared: its fingerprint is {member.fingerprint}, not {first.fingerprint}; give all engines the "
                    "same model files and settings, or name one device"
                )
        self._members = tuple(members)
        self._first = first
        self._blocks_each, self._in_flight = blocks, in_flight
        for name in Engine.__annotations__:
            setattr(self, name, getattr(first, name))
        device = members[0]
        self.precision, self.precision_reason = device.precision, device.precision_reason
        self.path, self.path_reason, self.profile = device.path, device.path_reason, device.profile
        self._changed = threading.Condition()
        self._isolating = threading.Lock()
        self._held: Member | None = None  # gets no other work as long as others work
        self._shared = False  # it got some all the same
        self._waiting = dict.fromkeys(self.members, 0)  # characters
        self._bulk = 0  # blocks of bulk calls that members have
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
        blocks = deque(slice(*ends) for ends in self._blocks(texts))
        lane = lane or ("bulk" if len(blocks) > 1 else None)
        pending: dict[Future[Vectors], slice] = {}
        suspects: list[slice] = []

        def queue(block: slice, only: Member | None = None) -> Future[Vectors]:
            count = partial(counts.__setitem__, block) if counted else None
            return _Block(self, texts[block], lane, input_type, False, count, only).queue()

        try:
            while blocks or pending:
                if blocks and self._waited_for_room(pending, lane):
                    block = blocks.popleft()
                    pending[future := _outcome(queue, block)] = block
                    if lane == "bulk":
                        future.add_done_callback(self._make_room)
                for future in wait(pending, 0 if blocks else None, FIRST_COMPLETED).done:
                    block = pending.pop(future)
                    try:
                        _fill(vectors[block], future)
                    except WorkerDied:
                        if lane == "interactive":
                            raise
                        suspects.append(block)
        finally:
            for future in pending:
                future.cancel()
        self._isolate(suspects, vectors, queue)
        return vectors, counts

    def _isolate(
        self, suspects: Sequence[slice], vectors: Vectors, queue: Callable[[slice, Member], Future[Vectors]]
    ) -> None:
        """Compute the halves of blocks that killed members, each alone at a member, down to the texts that do it. These
        get NaN after DEATHS deaths, at different members if possible. Raises WorkerDied after ROUNDS deaths."""
        # Block, deaths of a single text, and the member that the block or its other half killed last.
        blocks: deque[tuple[slice, int, Member | None]]
        blocks = deque((half, 0, None) for block in suspects for half in _halves(block))
        rounds = 0
        while blocks:
            self._check_open()
            block, deaths, killed = blocks.popleft()
            with self._held_alone(killed) as member:
                future = _outcome(queue, block, member)
                try:
                    _fill(vectors[block], future)
                except MEMBER_LOST:  # another one computes the block; without another one `_working` raises
                    blocks.append((block, deaths, killed))
                except WorkerDied as error:
                    if (rounds := rounds + 1) > ROUNDS:
                        raise WorkerDied(
                            f"the engines of {self.model} ended {rounds} times during one call, so the reason is "
                            "hardly a text; look at their logs and at their machines' memory, then try again"
                        ) from error
                    deaths += len(halves := _halves(block)) == 1 and not self._shared
                    if deaths < DEATHS:
                        blocks.extend((half, deaths, member) for half in halves)
                    else:
                        vectors[block] = np.nan
                        _log.warning("%d engines of %s ended while they computed one text", DEATHS, self.model)
                finally:
                    future.cancel()

    @contextmanager
    def _held_alone(self, avoided: Member | None) -> Iterator[Member]:
        """Yield a working member, if possible not the one to avoid, when its work is done, and give it no other work as
        long as others work; else `_shared` is set."""
        with self._isolating:
            try:
                with self._changed:
                    working = self._working()
                    members = [member for member in working if member is not avoided] or working
                    self._held = member = min(members, key=lambda each: (not each.ready, self._waiting[each]))
                    idle = self._changed.wait_for(lambda: not self._waiting[member], ALONE_SECONDS)
                    self._shared = not idle
                yield member
            finally:
                with self._changed:
                    self._held = None
                    self._changed.notify_all()

    def _waited_for_room(self, pending: Collection[Future[Vectors]], lane: Lane | None) -> bool:
        """Wait until a block may be queued, or one of these is done. Return whether one may be queued, and count it.
        Bulk work waits until the members have less of it, all work while another call has the only working member to
        itself."""

        def room() -> bool:
            self._check_open()
            working = self._working()
            return working != [self._held] and (lane != "bulk" or self._bulk < self._in_flight * len(working))

        def done() -> bool:
            return any(future.done() for future in pending)

        with self._changed:
            self._changed.wait_for(lambda: done() or room())
            found = not done()
            self._bulk += found and lane == "bulk"
            return found

    def _make_room(self, _done: Future[Vectors]) -> None:
        with self._changed:
            self._bulk -= 1
            self._changed.notify_all()

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
        future = _Block(self, strings(texts), lane, input_type, normalize, counted).queue()
        self.count(texts=len(texts), computed_texts=len(set(texts)))
        return future

    def _blocks(self, texts: Sequence[str]) -> list[tuple[int, int]]:
        """Return the start and end of each block of a call."""
        total, batch = sum(map(len, texts)), CHARACTERS * self._working()[0].planned_tokens
        least = int(SMALL_SHARE * batch)
        each = min(max(least, -(-total // (self._blocks_each * len(self._working())))), WINDOW * batch)
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

    def reserve(
        self, size: int, lane: Lane | None, tried: Collection[Member], only: Member | None = None
    ) -> Member | None:
        """Return the member with the least work that was not `tried`, or `only`, and count `size` characters more; None
        if there is none. Raises DeviceFailed if no member works, or `only` does not."""
        with self._changed:
            members = [member for member in self._working() if member not in tried]
            # Of equal ones, bulk work goes to a child process, because the first member tokenises in the caller's
            # thread; a search goes to the first one, because the way to a child takes longer.
            members = members[::-1] if lane == "bulk" else members
            if only is not None:
                if failure := self._failure(only):
                    raise DeviceFailed(failure)
                members = [only]
            elif self._held in members:
                self._shared |= len(members) == 1
                members = [member for member in members if member is not self._held] or members
            member = min(members, key=self._burden, default=None)
            if member is not None:
                self._waiting[member] += size
        return member

    def _burden(self, member: Member) -> tuple[bool, bool, int]:
        """Return what to compare members by: one that has died gets no second block until it has computed the first."""
        waiting = self._waiting[member]
        return not member.ready, waiting > 0 and member.deaths > 0, waiting

    def release(self, member: Member, size: int, error: BaseException | None = None) -> bool:
        """Count `size` characters less; return whether another member should compute them because of this error."""
        with self._changed:
            self._waiting[member] -= size
            self._changed.notify_all()
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
        """Return the sums over all members; texts and blocks as counted here."""
        each = [member.stats() for member in self.members]
        sums = {item.name: sum(getattr(stats, item.name) for stats in each) for item in fields(EngineStats)}
        counted = ("texts", "computed_texts", "blocks", "repeated_blocks")
        return replace(EngineStats(**sums), **{name: self._counts[name] for name in counted})

    def count(self, **more: int) -> None:
        with self._changed:
            self._counts.update(more)

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
class _Block:
    """Texts for one member, or for another one if it cannot compute them."""

    pool: EnginePool
    texts: Sequence[str]
    lane: Lane | None
    input_type: InputType
    normalize: bool
    counted: Callable[[list[int]], None] | None  # None after it was called
    only: Member | None = None  # no other member computes them
    deaths: int = 0
    answer: Future[Vectors] = field(default_factory=Future)
    tried: list[Member] = field(default_factory=list)

    def queue(self, error: BaseException | None = None) -> Future[Vectors]:
        """Queue the texts at the member with the least work; after a death, at one that was tried if no other is left.
        Raises its errors; `error` if all were tried."""
        size = sum(map(len, self.texts)) + len(self.texts)
        while (
            member := self.pool.reserve(size, self.lane, self.tried, self.only)
            or (self.pool.reserve(size, self.lane, ()) if isinstance(error, WorkerDied) else None)
        ) is not None:
            try:
                future = member.submit(
                    self.texts,
                    self.lane,
                    input_type=self.input_type,
                    normalize=self.normalize,
                    counted=None if self.counted is None else self._count,
                )
            except BaseException as refused:
                if not self._goes_on(member, size, refused):
                    raise
                error = refused
            else:
                self.pool.count(blocks=1, repeated_blocks=int(self.deaths > 0 or self.only is not None))
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

    def _goes_on(self, member: Member, size: int, error: BaseException | None) -> bool:
        """Return whether another member should compute the texts because of this error."""
        self.tried.append(member)
        self.deaths += isinstance(error, WorkerDied)
        return self.pool.release(member, size, error) and self.only is None and self.deaths < DEATHS

    def _answered(self, member: Member, size: int, future: Future[Vectors]) -> None:
        error = None if future.cancelled() else future.exception()
        if self._goes_on(member, size, error):
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


def _outcome(queue: Callable[..., Future[Vectors]], *block: Any) -> Future[Vectors]:
    """Return the future of a block, also of one that is refused."""
    try:
        return queue(*block)
    except BaseException as error:
        failed: Future[Vectors] = Future()
        failed.set_exception(error)
        return failed


def _fill(rows: Vectors, future: Future[Vectors]) -> None:
    """Wait for the vectors of a block and copy them to `rows`; NaN where a text has none."""
    try:
        rows[:] = future.result()
    except NonFinite as error:  # of all blocks; the caller raises it with positions in the call
        rows[:] = 1
        rows[list(error.indices)] = np.nan


def _halves(block: slice) -> list[slice]:
    middle = (block.start + block.stop) // 2
    return [slice(block.start, middle), slice(middle, block.stop)] if middle > block.start else [block]


def _cancel(future: Future[Vectors], answer: Future[Vectors]) -> None:
    if answer.cancelled():
        future.cancel()

"""Who waits for the device, whose turn it is, and which texts are computed together. Bookkeeping only: no thread, no
lock, no clock, no model; the batcher has those.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from .backends import TokenIds, Vectors

Lane = Literal["interactive", "bulk"]
"""interactive: somebody waits for the answer. bulk: a sync, a file, a large request."""
LANES: tuple[Lane, ...] = get_args(Lane)
WINDOW = 4
"""Budgets of tokens that are sorted by length and planned together, of everybody who waits in the lane."""
RUN_SECONDS = 0.1
"""So long interactive work goes on while bulk work waits; then bulk has one batch."""
_FADING = 0.9
"""What a batch counts for in the measured speed after the next one."""

Plan = Callable[[Sequence[int]], list[list[int]]]
"""Lengths -> positions in batches, longest first; `EmbeddingEngine.plan`."""


@dataclass(eq=False, slots=True)
class Request:
    """Texts of one caller, as token ids. `vectors`, row i for text i, is filled batch by batch."""

    tokens: Sequence[TokenIds]
    lane: Lane
    vectors: Vectors
    arrived: float
    future: Future[Vectors] = field(default_factory=Future)
    finish: Callable[[Vectors], Vectors] | None = None
    """What makes the caller's result of `vectors`, in the device's thread: it must be quick."""
    over: bool = False
    """Answered, failed or cancelled; what is left of it is not computed."""
    begun: bool = False
    bounded: bool = False
    """Somebody waits for it, whatever its lane: refused when it would queue too long."""
    missing: int = 0
    queued_texts: int = 0
    queued_tokens: int = 0
    _waiting: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.missing = self.queued_texts = len(self.tokens)
        self.queued_tokens = sum(map(len, self.tokens))
        self._waiting = sorted(range(len(self.tokens)), key=lambda place: len(self.tokens[place]))

    @property
    def waits(self) -> bool:
        return bool(self._waiting) and not self.over

    def pieces(self, tokens: int) -> list[Piece]:
        """The longest texts that are not planned yet, until they have so many tokens; at least one."""
        found: list[Piece] = []
        while self._waiting and (tokens > 0 or not found):
            found.append(Piece(self, self._waiting.pop()))
            tokens -= max(1, found[-1].length)
        return found

    def put_back(self, pieces: Sequence[Piece]) -> None:
        """The last of what `pieces` gave."""
        self._waiting += [piece.place for piece in reversed(pieces)]


class Piece(NamedTuple):
    """One text of a request."""

    request: Request
    place: int

    @property
    def tokens(self) -> TokenIds:
        return self.request.tokens[self.place]

    @property
    def length(self) -> int:
        return len(self.request.tokens[self.place])


class LaneQueue:
    """What waits in one lane. `texts` and `tokens`: how much that is; `bounded_tokens`: of bounded requests."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()
        self._planned: deque[list[Piece]] = deque()
        self.texts = 0
        self.tokens = 0
        self.bounded_tokens = 0

    def add(self, request: Request) -> None:
        self._requests.append(request)
        self.texts += request.queued_texts
        self.tokens += request.queued_tokens
        self.bounded_tokens += request.queued_tokens if request.bounded else 0

    def forget(self, request: Request) -> None:
        """Of one that is over: what is left of it does not wait any more."""
        self._left(request, request.queued_texts, request.queued_tokens)

    def take(self, plan: Plan, budget: int, most: int) -> list[Piece]:
        """The next batch: of a window of WINDOW times `budget` tokens, planned by `plan`; `most` tokens of it, if that
        is less.

        All who wait have an equal share of a window, in the order in which they came, so a small request never waits
        for the whole of a large one. [] when nobody waits.
        """
        while self._planned or self._plan(plan, WINDOW * budget):
            alive = [piece for piece in self._planned.popleft() if not piece.request.over]
            batch, rest = _cut(alive, most)  # it may have been planned before memory ran out, for a larger budget
            if rest:
                self._planned.appendleft(rest)
            for piece in batch:
                self._left(piece.request, 1, piece.length)
            if batch:
                return batch
        return []

    def drain(self) -> list[Request]:
        """Who waits, each of whom is to be ended now."""
        planned = (piece.request for batch in self._planned for piece in batch)
        found = [request for request in dict.fromkeys([*planned, *self._requests]) if not request.over]
        self._requests.clear()
        self._planned.clear()
        return found

    def _left(self, request: Request, texts: int, tokens: int) -> None:
        request.queued_texts -= texts
        request.queued_tokens -= tokens
        self.texts -= texts
        self.tokens -= tokens
        self.bounded_tokens -= tokens if request.bounded else 0

    def _plan(self, plan: Plan, window: int) -> bool:
        """Whether there was anything to plan."""
        share = max(1, window // max(1, len(self._requests)))
        pieces: list[Piece] = []
        for _ in range(len(self._requests)):
            if window <= 0:
                break
            request = self._requests.popleft()
            if request.waits:
                found = request.pieces(min(share, window))
                window -= sum(max(1, piece.length) for piece in found)
                pieces += found
            if request.waits:
                self._requests.append(request)
        try:
            planned = [[pieces[place] for place in batch] for batch in plan([piece.length for piece in pieces])]
        except BaseException:
            self._planned.append(pieces)  # where `drain` finds whose they are
            raise
        if len(planned) > 1 and len(self._requests) == 1 and all(piece.request.waits for piece in planned[-1]):
            self._requests[0].put_back(planned.pop())  # to be filled up: more of the same is coming
        self._planned.extend(planned)
        return bool(pieces)


def _cut(batch: list[Piece], tokens: int) -> tuple[list[Piece], list[Piece]]:
    """The first of a batch, until they have so many tokens, and the rest."""
    for place, piece in enumerate(batch):
        tokens -= piece.length
        if tokens < 0 and place:
            return batch[:place], batch[place:]
    return batch, []


class Turns:
    """Whose turn it is: interactive work first, but bulk work has a batch after every RUN_SECONDS of it, so that
    neither starves."""

    def __init__(self) -> None:
        self._run = 0.0

    def choose(self, *, interactive: bool, bulk: bool) -> Lane | None:
        if interactive and not (bulk and self._run >= RUN_SECONDS):
            return "interactive"
        return "bulk" if bulk else None

    def ran(self, lane: Lane, seconds: float, *, bulk: bool) -> None:
        """`bulk`: whether such work was waiting meanwhile."""
        self._run = self._run + seconds if lane == "interactive" and bulk else 0.0


TELLING_TOKENS = 64
"""Batches below it say nothing about speed under load, when batches are full."""


class Pace:
    """Tokens a second, by lane, as the last batches showed it."""

    def __init__(self) -> None:
        self._tokens = dict.fromkeys(LANES, 0.0)
        self._seconds = dict.fromkeys(LANES, 0.0)
        self._speed = 0.0

    def ran(self, lane: Lane, tokens: int, seconds: float) -> None:
        if tokens >= TELLING_TOKENS and seconds > 0:
            latest = tokens / seconds
            self._speed = self._speed * _FADING + latest * (1 - _FADING) if self._speed else latest
        self._tokens[lane] = self._tokens[lane] * _FADING + tokens
        self._seconds[lane] = self._seconds[lane] * _FADING + seconds

    def seconds_for(self, lane: Lane, tokens: int) -> float:
        """By the other lane's speed where this one has none yet; 0 before the first batch."""
        known = lane if self._tokens[lane] else next((each for each in LANES if self._tokens[each]), lane)
        return tokens * self._seconds[known] / self._tokens[known] if self._tokens[known] else 0.0

    def wait(self, tokens: int) -> float:
        """How long so many tokens keep the device busy, in seconds; 0 before a batch was large enough to tell: what
        small ones cost is hardly for their tokens."""
        return tokens / self._speed if self._speed else 0.0

    def tokens_in(self, lane: Lane, seconds: float) -> float:
        """How many tokens take so long; without end before the first batch."""
        each = self.seconds_for(lane, 1)
        return seconds / each if each else math.inf

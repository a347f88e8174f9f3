"""What a way to find changes gives to a run: batches of rows, and where the next run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from connector.model import Key, Row

Load = Callable[[Sequence[Key]], Sequence[Row]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows as they were read, in order.

    `load`: the rows carry key and token only, and it reads those whose token is not the stored one, each with the token
    of just that content; None: they carry their values.
    `gone`: keys that the source no longer has. `mark`: what the checkpoint may say once this batch and all before it
    are stored; None: nothing new. `done` is called after that has been committed. `late`: of the rows with these keys,
    would the configured method have missed a change?
    """

    rows: Sequence[Row]
    load: Load | None = None
    gone: Sequence[Key] = ()
    mark: Mapping[str, Any] | None = None
    done: Callable[[], None] | None = None
    late: Callable[[Key], bool] | None = None


class Feed(Protocol):
    """One pass over changes, for one run."""

    complete: bool
    """Gives every live row: what it does not give is gone."""
    trusts_tokens: bool
    """A row with the stored token is unchanged. False in a comparison that shall prove the tokens."""

    def total(self) -> int:
        """Rows to expect, for progress; 0 when nobody can tell."""
        ...

    def batches(self) -> Iterator[Batch]:
        """May be called once."""
        ...

    def mark(self) -> Mapping[str, Any] | None:
        """Where the next run goes on, once all batches were given and stored."""
        ...


@runtime_checkable
class Divided(Feed, Protocol):
    """A feed whose batches come from several places at once, in no order between them."""

    def streams(self) -> Sequence[Iterator[Batch]]:
        """What `batches` gives, divided. Instead of that, and once; each part is iterated in a thread of its own."""
        ...

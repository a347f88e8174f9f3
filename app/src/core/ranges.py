"""Names for what an engine does (tokenise, copy, forward, pool), as ranges in a profiler's picture. Nobody looking, a
range costs one comparison. Knows nothing of what it names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")
Opener = Callable[[str], AbstractContextManager[object]]
"""Opens a range of this name, for the thread that calls it."""

_openers: tuple[Opener, ...] = ()


def ranged(name: str) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Each call of the function is a range of this name."""

    def named(function: Callable[Given, Result]) -> Callable[Given, Result]:
        @wraps(function)
        def call(*given: Given.args, **named: Given.kwargs) -> Result:
            if not _openers:
                return function(*given, **named)
            with ExitStack() as open_ranges:
                for opener in _openers:
                    open_ranges.enter_context(opener(name))
                return function(*given, **named)

        return call

    return named


@contextmanager
def shown_to(opener: Opener) -> Iterator[None]:
    """Ranges of every thread open here, too, until this ends."""
    global _openers
    _openers = (*_openers, opener)
    try:
        yield
    finally:
        _openers = tuple(each for each in _openers if each is not opener)


def show_to_nvtx() -> None:
    """From now on ranges are NVTX's, which Nsight Systems shows; for the whole process, like NVTX itself. Only with a
    build of torch for CUDA: another one raises RuntimeError when a range opens."""
    global _openers
    import torch

    if torch.cuda.nvtx.range not in _openers:
        _openers = (*_openers, torch.cuda.nvtx.range)

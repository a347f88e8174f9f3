"""Named ranges of an engine's steps (tokenise, copy, forward, pool) for profilers. Without a profiler a range costs one
comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")
Opener = Callable[[str], AbstractContextManager[object]]  # opens a range of this name in the calling thread

_openers: tuple[Opener, ...] = ()


def ranged(name: str) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Make each call of the function a range of this name."""

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
    """Open the ranges of all threads in `opener`, too, within this context."""
    global _openers
    _openers = (*_openers, opener)
    try:
        yield
    finally:
        _openers = tuple(each for each in _openers if each is not opener)


def show_to_nvtx() -> None:
    """Open NVTX ranges, which Nsight Systems shows, in the whole process from now on. Needs torch for CUDA: with
    another build, ranges raise RuntimeError when they open."""
    global _openers
    import torch

    if torch.cuda.nvtx.range not in _openers:
        _openers = (*_openers, torch.cuda.nvtx.range)

"""NVTX ranges of an engine's steps (tokenise, copy, forward, pool), which Nsight Systems shows. Switched off, a range
costs one comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

_open: Callable[[str], AbstractContextManager[object]] | None = None


def ranged(name: str) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Make each call of the function a range of this name."""

    def named(function: Callable[Given, Result]) -> Callable[Given, Result]:
        @wraps(function)
        def call(*given: Given.args, **named: Given.kwargs) -> Result:
            if _open is None:
                return function(*given, **named)
            with _open(name):
                return function(*given, **named)

        return call

    return named


def show_to_nvtx() -> None:
    """Open the ranges in the whole process from now on. Needs torch for CUDA: with another build they raise
    RuntimeError."""
    global _open
    import torch

    _open = torch.cuda.nvtx.range

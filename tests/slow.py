"""Parameters of a test that run in the slow suite only. Those that say the most stay in the default suite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """A tuple is one set of several parameters."""
    return [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow) for one in values]


def slow_but(values: Iterable[Any], *kept: Any) -> list[Any]:
    """All of one parameter, in their order; those `kept` are not slow."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]

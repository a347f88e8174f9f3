"""A schema for tests that use collections of their own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def shared_schema(administrator: Any) -> Iterator[str]:
    """The name of a schema in the emulator, of a whole module: what a store makes when it opens is made once."""
    name = f"CONTRACTS_{next(_numbers)}"
    administrator.execute(f'CREATE SCHEMA "{name}"')
    yield name
    administrator.execute(f'DROP SCHEMA "{name}" CASCADE')

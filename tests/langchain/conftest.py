"""Services with a collection that clients write and one of a table, over both stores; no model but the hashing one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from app.src.langchain import Owl
from app.src.service.service import Service
from app.src.settings import Settings

NOTES = {"name": "notes", "documents": True}
Open = Callable[..., Owl]


@pytest.fixture(params=["local", "hana"])
def open_owl(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the same store, each time anew as another process would, with these collections. "hana" is the emulator."""
    yield from _opening(request.param, request, tmp_path)


@pytest.fixture
def open_local(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """As `open_owl`, for what does not depend on the store."""
    yield from _opening("local", request, tmp_path)


def _opening(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    hana: dict[str, Any] = {}
    store: dict[str, Any] = {"kind": "local", "path": tmp_path / "vectors"}
    if kind == "hana":
        emulator, schema = request.getfixturevalue("emulator"), request.getfixturevalue("hana_schema")
        login = {name: getattr(emulator, name) for name in ("host", "port", "user", "password")}
        hana, store = login | {"schema": schema, "encrypt": False, "pool_size": 4}, {"kind": "hana"}
    with ExitStack() as stack:

        def opened(*collections: dict[str, Any], model: str = "hash:64") -> Owl:
            settings = {"store": store, "embedding": {"model": model}, "state": {"path": tmp_path / "state"}}
            blocks = {"collections": collections or (NOTES,)}
            owl = Owl(service=Service(Settings.model_validate(settings | blocks | ({"hana": hana} if hana else {}))))
            stack.callback(owl.close)
            return owl

        yield opened

"""A service that asks for keys, and its application as an ASGI client sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.src.access.keys import Grant, create
from app.src.access.principal import Scope
from app.src.api.server import create_app
from app.src.service.service import Service
from app.src.settings import Settings

Serve = Callable[..., httpx.AsyncClient]


def settings_with(folder: Path, **access: Any) -> Settings:
    return Settings.model_validate(
        {
            "store": {"kind": "local", "path": folder / "vectors"},
            "embedding": {"model": "hash:16"},
            "access": access,
            "collections": [{"name": "materials", "source": "S.MARA", "template": "{MAKTX}"}],
        }
    )


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def key(key_file: Path) -> Callable[..., str]:
    """`key("search", ...)` makes one that may do that."""
    made = 0

    def make(*scopes: Scope, **more: Any) -> str:
        nonlocal made
        made += 1
        return create(key_file, Grant(f"key {made}", scopes, **more))[1]

    return make


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    made: list[Service] = []

    def make(**access: Any) -> Service:
        made.append(Service(settings_with(tmp_path, **access)))
        return made[-1]

    yield make
    for service in made:
        service.close()


def asking(service: Service, base: str = "http://localhost") -> httpx.AsyncClient:
    """A client of the application in this process, without a server between: paths arrive as they were written."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(service)), base_url=base)


def bearer(credential: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {credential}"}


def words(document: Sequence[str]) -> str:
    return " ".join(document)

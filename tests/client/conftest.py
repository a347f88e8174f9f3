"""A service over a table in memory behind a real HTTP server, and our clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from app.src.service.service import Service
from app.src.settings import Settings
from owl_sap_client import Client, Retries
from tests.api.conftest import TableSource, serving, settings_in

NEVER = Retries(most=0)


@dataclass
class Served:
    service: Service
    source: TableSource
    url: str
    http: httpx.Client


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With the collection `materials` synced, and `notes` for documents."""
    source = TableSource()
    given = settings_in(tmp_path_factory.mktemp("client")).model_dump(by_alias=True)
    given["collections"] = [*given["collections"], {"name": "notes", "documents": True}]
    service = Service(Settings.model_validate(given), source=source)
    try:
        service.sync.run("materials")
        with serving(service) as http:
            yield Served(service, source, str(http.base_url), http)
    finally:
        source.gate.set()
        service.close()


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url, retries=NEVER) as client:
        yield client

"""What readiness and doctor say of keys: red when nobody new could be let in, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.src.access.keys import Grant, create
from app.src.access.principal import AccessUnusable
from app.src.observe import Fault
from app.src.service.service import Service
from app.src.settings import Settings

Make = Callable[..., Service]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Service] = []

    def service(**access: Any) -> Service:
        settings = {
            "store": {"kind": "local", "path": tmp_path / "vectors"},
            "embedding": {"model": "hash:16"},
            "access": access,
        }
        made.append(Service(Settings.model_validate(settings)))
        return made[-1]

    yield service
    for each in made:
        each.close()


def doctors(service: Service) -> tuple[bool, str]:
    check = next(check for check in service.readiness.doctor() if check["check"] == "access")
    return check["ok"], check["detail"]


def test_without_authentication_nothing_is_said(make: Make) -> None:
    service = make()
    assert "access" not in service.readiness.check().checks
    assert not [check for check in service.readiness.doctor() if check["check"] == "access"]


def test_keys_that_end_soon_are_named(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    create(path, Grant("soon", ("search",), lifetime=86_400.0))
    create(path, Grant("later", ("search",)))
    ok, detail = doctors(make(keys=path))
    assert ok
    assert detail == "2 active API keys, of which expire within 14 days: soon"


def test_a_file_that_cannot_be_used_is_a_fault(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text("damaged")
    service = make(keys=path)
    ok, detail = doctors(service)
    assert not ok
    assert "not a valid file of API keys" in detail
    with pytest.raises(AccessUnusable):
        service.readiness.probe_access()


def test_an_issuer_that_is_away_is_red_where_there_are_no_keys(make: Make, tmp_path: Path) -> None:
    jwt = {"issuer": "https://i.example", "audience": "owl", "jwks_url": "http://127.0.0.1:1/keys"}
    alone = make(jwt=jwt).readiness.check()
    assert alone.checks["access"] is False
    assert "http://127.0.0.1:1/keys" in str(alone.unavailable)
    path = tmp_path / "keys.json"
    create(path, Grant("web", ("search",)))
    both = make(jwt=jwt, keys=path)
    both.access.open()
    assert both.readiness.check().checks["access"] is True  # who has a key is let in
    with pytest.raises(Fault, match="127"):
        both.readiness.probe_access()

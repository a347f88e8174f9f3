"""An answer that lasts ends with the right to it: a key was revoked, rotated or narrowed, or a token has expired."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.src.access.keys import Grant, create, revoke, rotate
from app.src.api import jobs
from app.src.service.service import Service
from app.src.service.sync import SyncRequest
from app.src.settings import Settings
from tests.access.issuer import AUDIENCE, ISSUER, claims, jwk, jwks, rsa_key, signed
from tests.access.test_tokens import at
from tests.api.conftest import TableSource, serving, settings_in


@pytest.fixture
def source() -> TableSource:
    return TableSource()


@pytest.fixture
def service(tmp_path: Path, source: TableSource, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.01)
    monkeypatch.setattr("app.src.access.files.LOOK_SECONDS", 0.0)
    shown = tmp_path / "jwks.json"
    shown.write_bytes(jwks(jwk(rsa_key(1), "one")))
    jwt = {"issuer": ISSUER, "audience": AUDIENCE, "jwks_path": shown}
    create(tmp_path / "keys.json", Grant("another", ("sync",)))
    document = settings_in(tmp_path).model_dump(by_alias=True)
    settings = Settings.model_validate(document | {"access": {"keys": tmp_path / "keys.json", "jwt": jwt}})
    with closing(Service(settings, source=source)) as service:
        yield service
        source.gate.set()


def narrowed(path: Path) -> None:
    """By hand, as an administrator may."""
    document = json.loads(path.read_text())
    for key in document["keys"]:
        key["scopes"] = ["search"] if key["name"] == "follower" else key["scopes"]
    path.write_text(json.dumps(document))


ENDS: dict[str, Callable[[Path, pytest.MonkeyPatch], Any]] = {
    "revoked": lambda path, _: revoke(path, "follower"),
    "rotated": lambda path, _: rotate(path, "follower", overlap=0),
    "narrowed": lambda path, _: narrowed(path),
    "expired token": lambda _, patch: at(patch, time.time() + 600),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_stream_of_events_ends_with_the_right_to_it(
    service: Service, source: TableSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    path = tmp_path / "keys.json"
    follower, other = (create(path, Grant(name, ("sync",)))[1] for name in ("follower", "other"))
    if end == "expired token":
        follower = signed(claims(scope="sync"), rsa_key(1))
    source.gate.clear()
    job = service.background.start_sync("materials", SyncRequest()).id
    with serving(service) as client, ExitStack() as streams:
        left, kept = (
            streams.enter_context(client.stream("GET", f"/v1/jobs/{job}/events", headers={"X-API-Key": credential}))
            for credential in (follower, other)
        )
        lines = left.iter_lines()
        assert next(lines).startswith("id:")
        ENDS[end](path, monkeypatch)
        assert "event: result" not in list(lines), "it ended, and the job goes on"
        answer = client.get(f"/v1/jobs/{job}/events", headers={"X-API-Key": follower})
        assert answer.status_code == (403 if end == "narrowed" else 401)
        source.gate.set()
        assert "event: result" in list(kept.iter_lines()), "others are not disturbed"


def test_without_authentication_there_is_nothing_to_lose(tmp_path: Path, source: TableSource) -> None:
    with closing(Service(settings_in(tmp_path), source=source)) as service, serving(service) as client:
        job = client.post("/v1/collections/materials/sync").json()["job"]
        with httpx.Client(base_url=client.base_url, timeout=60) as following:
            assert "event: result" in following.get(f"/v1/jobs/{job}/events").text

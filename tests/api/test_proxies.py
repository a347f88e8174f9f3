"""Behind a reverse proxy: whom its headers name is who asks, and what others write into them is not believed."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import httpx

from app.src.access.keys import Grant, create
from app.src.api.server import configuration, create_app
from app.src.service.service import Service
from app.src.settings import Settings

PROXY, GATEWAY = "172.20.0.1", "10.1.2.3"


def settings(folder: Path, proxies: str) -> Settings:
    return Settings.model_validate(
        {
            "embedding": {"model": "hash:16"},
            "store": {"kind": "local", "path": folder / "vectors"},
            "access": {"keys": folder / "keys.json", "failures": "1/minute", "audit": str(folder / "audit.log")},
            "api": {"trusted_proxies": proxies, "hsts": True},
        }
    )


def asked(service: Service, sent: list[tuple[str, dict[str, str]]]) -> list[httpx.Response]:
    """Each request from its peer, with its headers and a wrong key, through all that uvicorn puts around."""
    app = create_app(service)
    surrounded = configuration(app, service).loaded_app

    async def run() -> list[httpx.Response]:
        answers = []
        async with app.router.lifespan_context(app):  # its end closes the audit log
            for peer, headers in sent:
                transport = httpx.ASGITransport(surrounded, client=(peer, 40_000))
                async with httpx.AsyncClient(transport=transport, base_url="http://search.example.com") as client:
                    answers.append(await client.get("/v1/info", headers={"X-API-Key": "owl_wrong_wrong"} | headers))
        return answers

    return asyncio.run(run())


def test_the_clients_of_a_proxy_are_told_apart_and_nobody_else_is_believed(tmp_path: Path) -> None:
    create(tmp_path / "keys.json", Grant("somebody", ("search",)))
    forwarded = [
        (PROXY, {"X-Forwarded-For": "192.0.2.1", "X-Forwarded-Proto": "https"}),
        (PROXY, {"X-Forwarded-For": "192.0.2.2"}),
        (PROXY, {"X-Forwarded-For": "192.0.2.1"}),  # again: its second wrong key
        (PROXY, {"X-Forwarded-For": f"198.51.100.9, 192.0.2.1, {GATEWAY}"}),  # what a client put before is not believed
        ("203.0.113.5", {"X-Forwarded-For": "192.0.2.3", "X-Forwarded-Proto": "https"}),
        ("203.0.113.5", {"X-Forwarded-For": "192.0.2.4"}),
    ]
    with closing(Service(settings(tmp_path, f"{PROXY}, 10.0.0.0/8"))) as service:
        answers = asked(service, forwarded)
    assert [answer.status_code for answer in answers] == [401, 401, 429, 429, 401, 429]
    secure = ["Strict-Transport-Security" in answer.headers for answer in answers]
    assert secure == [True, False, False, False, False, False]
    log = (tmp_path / "audit.log").read_text(encoding="utf-8")
    assert log.count('"192.0.2.1"') == 2, "beyond its share an address gets one line"
    assert log.count('"203.0.113.5"') == 2
    assert "192.0.2.3" not in log
    assert "198.51.100.9" not in log


def test_without_the_setting_no_such_header_is_believed(tmp_path: Path) -> None:
    create(tmp_path / "keys.json", Grant("somebody", ("search",)))
    with closing(Service(settings(tmp_path, ""))) as service:
        answers = asked(service, [("127.0.0.1", {"X-Forwarded-For": f"192.0.2.{number}"}) for number in range(2)])
    assert [answer.status_code for answer in answers] == [401, 429], "one address, whatever it says"
    log = (tmp_path / "audit.log").read_text(encoding="utf-8")
    assert log.count('"127.0.0.1"') == 2
    assert "192.0.2." not in log

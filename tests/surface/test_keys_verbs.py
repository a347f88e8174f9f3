"""`owl-sap keys` and `owl-sap serve` as processes: keys made, rotated and revoked while the service runs; tokens beside
them; and nothing of either in any output.
"""

from __future__ import annotations

import json
import re
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from app.src.access import keys
from app.src.access.files import write_private
from app.src.access.principal import AccessUnusable
from app.src.cli import app
from tests.access.issuer import AUDIENCE, ISSUER, claims, jwk, jwks, rsa_key, signed
from tests.forked import owl_sap
from tests.surface.conftest import environment

Cli = Callable[..., Any]
SERVICE = {
    "OWL_SAP_EMBEDDING__MODEL": "hash:16",
    "OWL_SAP_STORE__KIND": "local",
    "OWL_SAP_STORE__PATH": "vectors",
    "OWL_SAP_ACCESS__KEYS": "keys.json",
}


@contextmanager
def served(folder: Path, *flags: str, **variables: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """The address, and what it wrote once it has ended."""
    process = owl_sap(
        "serve",
        "--port",
        "0",
        *flags,
        cwd=folder,
        env=environment(**SERVICE | variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    written: list[str] = []

    def end() -> str:
        if not written:
            process.terminate()
            written.extend(process.communicate(timeout=60))
        return "".join(written)

    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first, process.communicate()[1]
        yield json.loads(first)["url"].replace("0.0.0.0", "127.0.0.1"), end
    finally:
        end()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def becomes(status: int, url: str, key: str) -> bool:
    """Within the half second in which a service may not have looked at its keys, and some more."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if httpx.get(f"{url}/v1/info", headers=bearer(key), timeout=60).status_code == status:
            return True
        time.sleep(0.05)
    return False


def test_keys_change_while_the_service_runs(tmp_path: Path, cli: Cli) -> None:
    first = cli("keys", "create", "web", "--scope", "search", "--scope", "embed", "--json", **SERVICE).json
    scraper = cli("keys", "create", "prometheus", "--scope", "metrics", "--out", "metrics_token", **SERVICE)
    assert (scraper.code, scraper.out) == (0, "")
    assert stat.S_IMODE((tmp_path / "metrics_token").stat().st_mode) == 0o600
    with served(tmp_path, "--host", "0.0.0.0") as (url, end):
        assert httpx.get(f"{url}/v1/info", timeout=60).status_code == 401
        assert httpx.get(f"{url}/v1/info", headers=bearer(first["key"]), timeout=60).status_code == 200
        token = (tmp_path / "metrics_token").read_text()
        scraped = httpx.get(f"{url}/metrics", headers=bearer(token), timeout=60)
        assert (
            scraped.status_code,
            httpx.get(f"{url}/metrics", headers=bearer(first["key"]), timeout=60).status_code,
        ) == (
            200,
            403,
        )

        second = cli("keys", "rotate", "web", "--overlap", "1h", **SERVICE).out.strip()
        assert becomes(200, url, second)
        assert becomes(200, url, first["key"])
        cli("keys", "revoke", first["id"], **SERVICE)
        assert becomes(401, url, first["key"])
        assert httpx.get(f"{url}/v1/info", headers=bearer(second), timeout=60).status_code == 200

        listed = cli("keys", "list", "--json", **SERVICE)
        assert [(key["name"], key["state"]) for key in listed.json] == [
            ("web", "revoked"),
            ("prometheus", "active"),
            ("web", "active"),
        ]
        content = (tmp_path / "keys.json").read_text()
        (tmp_path / "keys.json").write_text("damaged")
        until = time.monotonic() + 60
        while httpx.get(f"{url}/health/ready", timeout=60).status_code == 200 and time.monotonic() < until:
            time.sleep(0.05)
        document = httpx.get(f"{url}/health/ready", headers=bearer(second), timeout=60).json()
        assert document["checks"]["access"] is False
        assert "keys.json" in document["detail"]
        assert "keys.json" not in httpx.get(f"{url}/health/ready", timeout=60).text
        assert httpx.get(f"{url}/v1/info", headers=bearer(second), timeout=60).status_code == 200
        (tmp_path / "keys.json").write_text(content)
        until = time.monotonic() + 60
        while httpx.get(f"{url}/health/ready", timeout=60).status_code != 200 and time.monotonic() < until:
            time.sleep(0.05)
        assert httpx.get(f"{url}/health/ready", timeout=60).status_code == 200
        written = end()
    shown = cli("config", "show", **SERVICE)
    for secret in (first["key"], second, token):
        for output in (written, listed.out, listed.err, content, shown.out, scraped.text, scraper.err):
            assert secret not in output
            assert secret.split("_", 2)[2] not in output


def test_tokens_beside_keys(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "jwks.json").write_bytes(jwks(jwk(rsa_key(1), "one")))
    jwt = {
        "OWL_SAP_ACCESS__JWT__ISSUER": ISSUER,
        "OWL_SAP_ACCESS__JWT__AUDIENCE": AUDIENCE,
        "OWL_SAP_ACCESS__JWT__JWKS_PATH": "jwks.json",
        "OWL_SAP_ACCESS__JWT__SCOPES": "Viewer=search, Looker=embed",
    }
    key = cli("keys", "create", "web", "--scope", "embed", **SERVICE).out.strip()
    good, forged = signed(claims(scope="Looker"), rsa_key(1)), signed(claims(scope="Looker"), rsa_key(2))
    with served(tmp_path, **jwt) as (url, end):
        for credential, status in ((key, 200), (good, 200), (forged, 401), (key[:-1], 401)):
            answer = httpx.post(f"{url}/embed", json={"inputs": "x"}, headers=bearer(credential), timeout=60)
            assert answer.status_code == status
            assert credential not in answer.text + str(answer.headers)
            if status == 401:
                assert 'error="invalid_token"' in answer.headers["www-authenticate"]
        assert httpx.get(f"{url}/v1/jobs", headers=bearer(good), timeout=60).status_code == 403
        written = end()
    assert good not in written
    assert forged not in written


def test_claims_and_limits_of_a_key(tmp_path: Path, cli: Cli) -> None:
    run = cli(
        *(
            "keys",
            "create",
            "shop",
            "--scope",
            "search",
            "--claim",
            "mandt=100",
            "--claim",
            "mandt=200",
            "--claim",
            "a=b=c",
        ),
        *("--expires", "90d", "--rate", "600/minute", "--concurrency", "4", "--every-row", "--json"),
        **SERVICE,
    )
    key = run.json
    assert (key["claims"], key["every_row"]) == ({"mandt": ["100", "200"], "a": "b=c"}, True)
    assert (key["rate"], key["concurrency"]) == ("600/minute", 4)
    assert key["key"] not in run.err


REFUSED = [
    (("create", "web", "--scope", "everything"), "unknown scope"),
    (("list",), "keys create"),
    (("revoke", "web"), "does not exist"),
    (("rotate", "web"), "does not exist"),
    (("create", "web"), "scope"),
    (("create", "", "--scope", "search"), "not a valid key name"),
    (("create", "web", "--scope", "search", "--expires", "soon"), "duration"),
    (("create", "web", "--scope", "search", "--expires", "0s"), "must be above 0"),
    (("create", "web", "--scope", "search", "--claim", "mandt"), "NAME=VALUE"),
    (("create", "web", "--scope", "search", "--rate", "often"), "600/minute"),
    (("create", "web", "--scope", "search", "--out", "no/such/key"), "folder not found; create it: mkdir -m 700"),
    (("rotate", "web", "--overlap", "long"), "duration"),
    (("create", "web", "--scope", "search", "--expires", "90"), "--expires 90 needs a unit: write 90d for days"),
    (("create", "web", "--scope", "search", "--expires", "1.5"), "needs a unit"),
    (("rotate", "web", "--overlap", "24", "--expires", "90d"), "--overlap 24 needs a unit"),
]


@pytest.mark.parametrize(("arguments", "why"), REFUSED[:4])
def test_refusals(tmp_path: Path, cli: Cli, arguments: tuple[str, ...], why: str) -> None:
    run = cli("keys", *arguments, **SERVICE)
    assert (run.code, run.out) == (2, "")
    assert why in run.err
    assert not (tmp_path / "keys.json").exists()


@pytest.mark.parametrize(("arguments", "why"), REFUSED)
def test_refusals_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], why: str
) -> None:
    """Those above and many more: a process takes its time to start."""
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(app, ["keys", *arguments], env=SERVICE)
    assert run.exit_code == 2
    assert why in run.stderr
    assert not (tmp_path / "keys.json").exists()


def test_a_key_that_could_not_be_handed_over_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    real = write_private

    def full(path: Path, content: bytes) -> None:
        if path.name == "token":
            raise AccessUnusable("token: cannot be replaced (No space left on device)")
        real(path, content)

    monkeypatch.setattr("app.src.access.files.write_private", full)
    run = CliRunner().invoke(app, ["keys", "create", "web", "--scope", "search", "--out", "token"], env=SERVICE)
    assert (run.exit_code, run.stdout) == (2, "")
    assert not (tmp_path / "keys.json").exists()
    keys.create(tmp_path / "keys.json", keys.Grant("old", ("search",), lifetime=9e6))
    before = keys.read(tmp_path / "keys.json")
    rotated = ["keys", "rotate", "old", "--overlap", "0s", "--out", "token"]
    assert CliRunner().invoke(app, rotated, env=SERVICE).exit_code == 2
    assert keys.read(tmp_path / "keys.json") == before, "the old key stays valid"
    refused = CliRunner().invoke(app, ["keys", "create", "w", "--scope", "search", "--out", "/dev/null"], env=SERVICE)
    assert refused.exit_code == 2
    assert Path("/dev/null").is_char_device()


def test_without_a_file_configured_it_says_what_to_set(cli: Cli) -> None:
    run = cli("keys", "list")
    assert run.code == 2
    assert "OWL_SAP_ACCESS__KEYS" in run.err


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({}, "keys create"),  # the file is not there
        ({"OWL_SAP_ACCESS__JWT__ISSUER": ISSUER}, "jwks_url or jwks_path"),
        ({"OWL_SAP_ACCESS__KEYS": "damaged.json"}, "move it away"),
    ],
)
def test_a_service_whose_keys_cannot_be_read_does_not_start(
    tmp_path: Path, cli: Cli, variables: dict[str, str], why: str
) -> None:
    (tmp_path / "damaged.json").write_text("{}x")
    run = cli("serve", "--port", "0", **SERVICE | variables)
    assert (run.code, run.out) == (2, "")
    assert why in run.err


def test_create_says_when_the_key_ends(cli: Cli) -> None:
    told = _created(cli, "web", "--expires", "90d")
    assert re.search(r"may: search, until \d{4}-\d\d-\d\d \d\d:\d\d UTC; it is", told)
    assert "until" not in _created(cli, "shop")


def _created(cli: Cli, name: str, *flags: str) -> str:
    run = cli("keys", "create", name, "--scope", "search", *flags, **SERVICE)
    assert run.code == 0
    return str(run.err)

"""The product over TLS, certificate checked, against an emulator that was started as a person starts it."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forked import owl_sap
from tests.surface.conftest import ROOT, environment

pytest.importorskip("hdbcli")

Cli = Callable[..., Any]
MATERIALS = """
[[collections]]
name = "materials"
source = "SAPDEMO.V_MATERIALS"
key = ["MANDT", "MATNR", "SPRAS"]
where = "MANDT = '100'"
template = "{MAKTX}"
"""


def started(*options: str) -> Iterator[dict[str, Any]]:
    with owl_sap(
        *("emulator", "--port", "0", *options),
        stdout=subprocess.PIPE,
        env=environment() | {"PYTHONPATH": str(ROOT)},
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
    assert code == 0


@pytest.fixture(scope="module")
def secure() -> Iterator[dict[str, Any]]:
    yield from started("--sample", "--tls")


@pytest.fixture(
    params=[["--tls-expired"], pytest.param(["--tls-host", "db.example"], marks=pytest.mark.slow)],
    ids=["expired", "other-host"],
)
def unfit(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    yield from started(*request.param)


def variables(greeting: dict[str, Any], **more: str) -> dict[str, str]:
    return {
        "HANA_HOST": "localhost",
        "HANA_PORT": str(greeting["port"]),
        "HANA_USER": greeting["user"],
        "HANA_PASSWORD": greeting["password"],
        "HANA_SCHEMA": greeting["schema"],
        "HANA_SSL_TRUST_STORE": greeting["trust_store"],
        "OWL_SAP_EMBEDDING__MODEL": "hash:32",
    } | more


@pytest.fixture
def configured(tmp_path: Path) -> None:
    (tmp_path / "owl-sap.toml").write_text(MATERIALS)


@pytest.mark.usefixtures("configured")
def test_the_whole_path(cli: Cli, secure: dict[str, Any]) -> None:
    assert set(secure) == {"host", "port", "user", "password", "schema", "trust_store"}
    login = variables(secure)
    (report,) = cli("sync", "materials", "--json", **login).json
    assert report["upserted"] > 500
    assert "chair" in cli("search", "materials", "swivel chair", "--json", **login).json[0]["text"]
    assert cli("verify", "materials", **login).code == 0
    doctor = cli("doctor", "--json", **login)
    checks = {check["check"]: check["detail"] for check in doctor.json}
    assert doctor.code == 0, checks
    assert checks["hana tls"].startswith("TLSv1.")
    assert "valid until" in checks["hana tls"]


@pytest.mark.usefixtures("configured")
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"HANA_SSL_TRUST_STORE": ""}, "not trusted"),
        ({"HANA_HOST": "127.0.0.1"}, "another name"),
        ({"HANA_SSL_TRUST_STORE": "nowhere.pem"}, "nowhere.pem"),
        pytest.param({"HANA_ENCRYPT": "false"}, "could not be reached", marks=pytest.mark.slow),
    ],
)
@pytest.mark.proves(8)
def test_what_does_not_fit_is_refused(here: Cli, secure: dict[str, Any], change: dict[str, str], word: str) -> None:
    run = here("sync", "materials", **variables(secure, **change))
    assert run.code == 3, run.err
    assert word in " ".join(run.err.split())


@pytest.mark.usefixtures("configured")
@pytest.mark.proves(8)
def test_certificates_that_must_be_refused(here: Cli, unfit: dict[str, Any]) -> None:
    login = variables(unfit)
    assert here("sync", "materials", **login).code == 3
    checks = {check["check"]: check for check in here("doctor", "--json", **login).json}
    assert not checks["hana tls"]["ok"]
    assert "certificate" in checks["hana tls"]["detail"]

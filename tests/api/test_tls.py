"""The service over TLS: a real handshake with a certificate of a test's own authority; what cannot be used is refused
at the start, and doctor says how long it will do.
"""

from __future__ import annotations

import datetime
import json
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import trustme

from app.src.api import tls
from app.src.doctor import Fault, certificate
from app.src.settings import ApiSettings
from connector.errors import ConfigurationError
from tests.surface.test_serve import VARIABLES

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def issued(authority: trustme.CA, folder: Path, days: float = 365) -> ApiSettings:
    folder.mkdir(exist_ok=True)
    made = authority.issue_cert("localhost", "127.0.0.1", not_after=NOW + datetime.timedelta(days=days))
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    key.write_bytes(made.private_key_pem.bytes())
    key.chmod(0o600)
    return ApiSettings(tls_certificate=cert, tls_key=key)


@contextmanager
def served(folder: Path, api: ApiSettings) -> Iterator[str]:
    files = {
        "OWL_SAP_API__TLS_CERTIFICATE": str(api.tls_certificate),
        "OWL_SAP_API__TLS_KEY": str(api.tls_key),
        "OWL_SAP_API__HSTS": "true",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "app", "serve", "--port", "0"],
        cwd=folder,
        env=VARIABLES | files,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            _, errors = process.communicate()
            console, *rest = errors.splitlines()
            assert console.startswith("Console: https://")
            assert (process.returncode, [line for line in rest if not line.startswith("REST: ")]) == (0, [])


@pytest.mark.covers("serve", "POST /embed")
def test_served_over_tls_1_2_and_later(tmp_path: Path, authority: trustme.CA) -> None:
    with served(tmp_path, issued(authority, tmp_path / "tls")) as url:
        assert url.startswith("https://127.0.0.1:")
        trust = ssl.create_default_context()
        authority.configure_trust(trust)
        with httpx.Client(base_url=url, verify=trust, timeout=60) as client:
            answer = client.post("/embed", json={"inputs": "steel"})
            assert len(answer.json()[0]) == 16
            assert answer.headers["strict-transport-security"] == "max-age=31536000"
        with pytest.raises(httpx.ConnectError), httpx.Client(base_url=url) as stranger:
            stranger.get("/health/live")
        with pytest.raises(httpx.HTTPError), httpx.Client() as plain:
            plain.get(url.replace("https", "http") + "/health/live")


def test_old_versions_are_refused(tmp_path: Path, authority: trustme.CA) -> None:
    context = tls.context(issued(authority, tmp_path))
    assert context is not None
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert tls.context(ApiSettings()) is None


def test_what_cannot_be_used_ends_the_start(tmp_path: Path, authority: trustme.CA) -> None:
    good, other = issued(authority, tmp_path / "good"), issued(authority, tmp_path / "other")
    text = tmp_path / "text.pem"
    text.write_text("no certificate", encoding="utf-8")
    wrong = [
        good.model_copy(update={"tls_key": other.tls_key}),
        good.model_copy(update={"tls_key": good.tls_certificate}),
        good.model_copy(update={"tls_certificate": text}),
        good.model_copy(update={"tls_certificate": tmp_path / "nowhere.pem"}),
    ]
    for api in wrong:
        with pytest.raises(ConfigurationError, match=r"tls_certificate|tls_key") as refused:
            tls.context(api)
        assert "PRIVATE" not in str(refused.value)
        with pytest.raises(Fault):
            certificate.of_service(api)
    with pytest.raises(ValueError, match="belong together"):
        ApiSettings(tls_certificate=good.tls_certificate)


def test_doctor_says_how_long_it_will_do(tmp_path: Path, authority: trustme.CA) -> None:
    good = issued(authority, tmp_path)
    assert "localhost, 127.0.0.1" in certificate.of_service(good)
    for days, words in ((13.5, "in 13 days"), (-1, "ended on")):
        with pytest.raises(Fault, match=words) as fault:
            certificate.of_service(issued(authority, tmp_path, days))
        assert "renew" in fault.value.fix
    good = issued(authority, tmp_path)
    assert good.tls_key is not None
    good.tls_key.chmod(0o644)
    with pytest.raises(Fault, match="everybody") as fault:
        certificate.of_service(good)
    assert "chmod" in fault.value.fix
    good.tls_key.chmod(stat.S_IRUSR | stat.S_IRGRP)
    assert certificate.of_service(good)

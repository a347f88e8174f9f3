"""The service over TLS: a real handshake with a certificate of a test's own authority; what cannot be used is refused
at the start, and later leaves what is served in force; a new one is taken up; doctor says how long it will do.
"""

from __future__ import annotations

import datetime
import json
import logging
import ssl
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from cryptography import x509

from app.src.access import files
from app.src.api import server
from app.src.observe import Fault, checks
from app.src.settings import ApiSettings
from connector.errors import ConfigurationError
from tests.forked import owl_sap
from tests.surface.test_serve import VARIABLES

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def issued(authority: trustme.CA, folder: Path, days: float = 365, begins: float = -9999) -> ApiSettings:
    folder.mkdir(exist_ok=True)
    first, last = (NOW + datetime.timedelta(days=each) for each in (begins, days))
    made = authority.issue_cert("localhost", "127.0.0.1", not_before=first, not_after=last)
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
    with owl_sap(
        "serve",
        "--port",
        "0",
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


def serial(certificate: bytes) -> int:
    return x509.load_der_x509_certificate(certificate).serial_number


def presented(client: httpx.Client) -> bytes:
    """The certificate of the connection that the client has open."""
    answer = client.get("/health/live")
    shown = answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert(True)
    assert isinstance(shown, bytes)
    return shown


def served_now(url: str, trust: ssl.SSLContext) -> bytes:
    """That of a new connection."""
    with httpx.Client(base_url=url, verify=trust, timeout=60) as client:
        return presented(client)


def shaken(server: ssl.SSLContext, authority: trustme.CA, name: str | None = "localhost") -> int:
    """The serial number of what a client gets to see, in a handshake without a network."""
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    trust.check_hostname = name is not None
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trust.wrap_bio(to_client, to_server, server_hostname=name)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (client, other, client, other, client):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    shown = client.getpeercert(binary_form=True)
    assert shown is not None
    return serial(shown)


def test_served_over_tls_1_2_and_later(tmp_path: Path, authority: trustme.CA) -> None:
    with served(tmp_path, issued(authority, tmp_path / "tls")) as url:
        assert url.startswith("https://127.0.0.1:")
        trust = ssl.create_default_context()
        authority.configure_trust(trust)
        with httpx.Client(base_url=url, verify=trust, timeout=60) as client:
            answer = client.post("/embed", json={"inputs": "steel"})
            assert len(answer.json()[0]) == 16
            assert answer.headers["strict-transport-security"] == "max-age=31536000"
            first = serial(presented(client))
            told = client.get("/metrics").text
            assert "owl_sap_tls_certificate_refused 0.0" in told
            assert "owl_sap_event_loop_lag_seconds_count" in told
            issued(authority, tmp_path / "tls")
            assert serial(presented(client)) == first, "an open connection keeps its own"
        deadline = time.monotonic() + 20
        while first == serial(served_now(url, trust)):
            assert time.monotonic() < deadline, "the new certificate is not taken up"
            time.sleep(0.1)
        with pytest.raises(httpx.ConnectError), httpx.Client(base_url=url, timeout=60) as stranger:
            stranger.get("/health/live")
        with pytest.raises(httpx.HTTPError), httpx.Client() as plain:
            plain.get(url.replace("https", "http") + "/health/live")


def certificate_of(api: ApiSettings, **how: Any) -> server.Certificate:
    assert api.tls_certificate is not None
    assert api.tls_key is not None
    return server.Certificate(api.tls_certificate, api.tls_key, **how)


def test_old_versions_are_refused(tmp_path: Path, authority: trustme.CA) -> None:
    certificate = certificate_of(issued(authority, tmp_path))
    assert certificate.context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert certificate.context.options & ssl.OP_NO_RENEGOTIATION


def test_a_new_certificate_is_taken_up_and_a_bad_one_is_not(
    tmp_path: Path, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    api, now = issued(authority, tmp_path, days=10), [0.0]
    certificate = certificate_of(api, clock=lambda: now[0])
    assert api.tls_key is not None

    def after_a_while(name: str | None = "localhost") -> int:
        now[0] += files.LOOK_SECONDS
        return shaken(certificate.context, authority, name)

    def told() -> tuple[float, float | None]:
        (_, _, ends), (_, _, refused) = certificate.samples()
        assert ends is not None
        return round((ends - NOW.timestamp()) / 86400), refused

    first = after_a_while()
    assert told() == (10, 0.0)
    issued(authority, tmp_path, days=90)
    assert shaken(certificate.context, authority) == first, "the files are not looked at with every handshake"
    second = after_a_while(name=None)  # a client that names no host gets the new one too
    assert second != first
    assert told() == (90, 0.0)

    good = api.tls_key.read_bytes()
    with caplog.at_level(logging.WARNING):
        for text in (b"", b"no key", issued(authority, tmp_path / "other").tls_key.read_bytes()):  # type: ignore[union-attr]
            api.tls_key.write_bytes(text)
            assert after_a_while() == second
            assert after_a_while() == second
        api.tls_key.unlink()
        assert after_a_while() == second
        assert after_a_while() == second
    assert told() == (90, 1.0)
    assert [("stays in force" in record.message, "PRIVATE" in record.message) for record in caplog.records] == [
        (True, False),  # not the pair that it should be; the three of them are one fault
        (True, False),  # gone
    ]
    api.tls_key.write_bytes(good)
    assert after_a_while() == second
    assert told() == (90, 0.0)
    issued(authority, tmp_path, days=300)
    assert after_a_while() not in (first, second)


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
            certificate_of(api)
        assert "PRIVATE" not in str(refused.value)
        with pytest.raises(Fault):
            checks.certificate(api)
    with pytest.raises(ValueError, match="must be set together"):
        ApiSettings(tls_certificate=good.tls_certificate)


def test_doctor_says_how_long_it_will_do(tmp_path: Path, authority: trustme.CA) -> None:
    good = issued(authority, tmp_path)
    assert "localhost, 127.0.0.1" in checks.certificate(good)
    for days, words in ((13.5, "in 13 days"), (-1, "ended on")):
        with pytest.raises(Fault, match=words) as fault:
            checks.certificate(issued(authority, tmp_path, days))
        assert "renew" in fault.value.fix
    with pytest.raises(Fault, match="is valid from") as fault:
        checks.certificate(issued(authority, tmp_path, 90, begins=3))
    assert "clock" in fault.value.fix
    good = issued(authority, tmp_path)
    assert good.tls_key is not None
    good.tls_key.chmod(0o644)
    with pytest.raises(Fault, match="everybody") as fault:
        checks.certificate(good)
    assert "chmod" in fault.value.fix
    good.tls_key.chmod(stat.S_IRUSR | stat.S_IRGRP)
    assert checks.certificate(good)

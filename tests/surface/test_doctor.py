"""Doctor's own probes: network, TLS, trust store, disk, GPU; and how a failure is told."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.src import doctor
from app.src.doctor import Fault
from app.src.settings import CollectionSettings, HanaSettings, Settings


class Known(Exception):
    pass


class Patient:
    """Everything is well, but for what a test replaces."""

    expected_errors = (Known,)

    def __init__(self, **document: object) -> None:
        self.settings = Settings.model_validate({"embedding": {"model": "hash:8"}} | document)

    def probe_model(self) -> str:
        return "model"

    def probe_login(self, hana: HanaSettings) -> str:
        return "in"

    def probe_vector_types(self) -> str:
        return "REAL_VECTOR"

    def probe_table(self, collection: CollectionSettings) -> str:
        return collection.name

    def probe_store(self) -> str:
        return "store"


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def found(patient: Patient) -> dict[str, doctor.Check]:
    return {check.check: check for check in doctor.examine(patient)}


def test_in_order_and_all_well(listener: int) -> None:
    patient = Patient(
        hana={"host": "127.0.0.1", "port": listener, "encrypt": False},
        collections=[{"name": "a", "source": "S.T", "template": "{X}"}],
    )
    names = [check.check for check in doctor.examine(patient) if check.ok]
    assert names == [
        "python", "torch", "gpu", "model", "hdbcli", "hana address", "hana dns", "hana tcp", "hana tls", "hana login",
        "table of a", "vector types", "store writable", "disk",
    ]  # fmt: skip
    assert "plain text" in found(patient)["hana tls"].detail


def test_a_closed_port_stops_what_builds_on_it() -> None:
    checks = found(Patient(hana={"host": "127.0.0.1", "port": closed_port(), "encrypt": False}))
    assert not checks["hana tcp"].ok
    assert "HANA_PORT" in checks["hana tcp"].fix
    assert '"hana tcp" failed' in checks["hana tls"].detail
    assert not checks["store writable"].ok


def test_a_name_that_does_not_resolve() -> None:
    checks = found(Patient(hana={"host": "no-such-host.invalid"}))
    assert "no-such-host.invalid" in checks["hana dns"].detail
    assert checks["hana dns"].fix


def test_two_hanas_are_checked_both(listener: int) -> None:
    good = {"host": "127.0.0.1", "port": listener, "encrypt": False}
    checks = found(Patient(hana=good, store={"hana": good | {"port": closed_port()}}))
    assert checks["hana login"].ok
    assert not checks["store hana tcp"].ok
    assert not checks["vector types"].ok


def test_a_userkey_needs_no_address() -> None:
    checks = found(Patient(hana={"userkey": "OWL"}))
    assert checks["hana login"].ok
    assert "hana dns" not in checks


def test_a_server_without_tls_is_told_apart(listener: int) -> None:
    hana = HanaSettings(host="127.0.0.1", port=closed_port())
    with pytest.raises(Fault, match="does not speak TLS") as caught:
        doctor._tls(hana)
    assert "encrypt = false" in caught.value.fix


def test_a_missing_trust_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(Fault, match="does not exist"):
        doctor._context(HanaSettings(host="h", trust_store=str(tmp_path / "no.pem")))


def test_validation_follows_the_settings() -> None:
    strict, loose, any_name = (
        doctor._context(HanaSettings(host="h", validate_certificate=validate, host_name_in_certificate=name))
        for validate, name in [(True, None), (False, None), (True, "*")]
    )
    assert strict.check_hostname
    assert loose.verify_mode == 0
    assert not any_name.check_hostname
    assert any_name.verify_mode == strict.verify_mode


def test_too_little_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "GiB free" in doctor._disk(tmp_path / "not" / "yet")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 20))
    with pytest.raises(Fault, match="5 MiB"):
        doctor._disk(tmp_path)


def test_a_gpu_that_is_asked_for_and_missing_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_nvidia_devices", lambda: None)
    assert "CPU is used" in found(Patient())["gpu"].detail
    for embedding in ({"expect_gpu": True}, {"device": "cuda"}):
        assert not found(Patient(embedding={"model": "hash:8"} | embedding))["gpu"].ok
    monkeypatch.setattr(doctor, "_nvidia_devices", lambda: "Tesla T4; driver 580")
    assert found(Patient(embedding={"model": "hash:8", "expect_gpu": True}))["gpu"].detail == "Tesla T4; driver 580"


def test_errors_are_told_with_a_fix_and_unexpected_ones_without_their_text() -> None:
    class Ill(Patient):
        def probe_model(self) -> str:
            raise Known("no such model")

        def probe_store(self) -> str:
            raise KeyError("row text")

    checks = found(Ill(store={"kind": "local", "path": "x"}))
    assert (checks["model"].ok, checks["model"].detail) == (False, "no such model")
    assert checks["model"].fix
    assert "row text" not in checks["store writable"].detail


def test_a_missing_package_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "hash:8 needs none" in doctor._torch(Patient().settings)
    with pytest.raises(Fault) as caught:
        doctor._torch(Settings())
    assert "[engine]" in caught.value.fix
    with pytest.raises(Fault) as caught:
        doctor._hdbcli()
    assert "[hana]" in caught.value.fix

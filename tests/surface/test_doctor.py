"""Doctor's order, how a failure is told, its look at the machine. The network is test_doctor_network.py's matter."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from app.src.core import device
from app.src.core.nvml import GpuSnapshot, GpuState, throttles
from app.src.observe import Fault, checks, gpu
from app.src.observe.checks import Checks
from app.src.observe.gpu import gpu_missing
from app.src.observe.network import Network
from app.src.service.rerank import Reranker, RerankFailed
from app.src.service.service import Service
from app.src.service.wiring import Parts
from app.src.settings import CollectionSettings, EmbeddingSettings, HanaSettings, Settings
from connector.errors import (
    ConfigurationError,
    ConnectFailed,
    DatabaseError,
    LoginRefused,
    PermissionRefused,
    UnknownTable,
)
from connector.hana.connection import HanaFeatures
from connector.model import TableRef


class Known(Exception):
    pass


class Patient(Checks):
    """Everything is well, but for what a test replaces."""

    def __init__(self, **document: object) -> None:
        defaults = {"embedding": {"model": "hash:8"}, "api": {"port": 0}}
        settings = Settings.model_validate(defaults | document)
        super().__init__(cast("Parts", SimpleNamespace(settings=settings, expected_errors=(Known,))))

    def probe_model(self) -> str:
        return "model"

    def probe_choices(self) -> str:
        return "chosen"

    def probe_login(self, hana: HanaSettings) -> str:
        return "in"

    def probe_rights(self, hana: HanaSettings) -> str:
        return "enough"

    def probe_vector_types(self) -> str:
        return "REAL_VECTOR"

    def probe_table(self, collection: CollectionSettings) -> str:
        return collection.name

    def probe_access(self) -> str:
        return "2 active API keys"

    def probe_store(self) -> str:
        return "store"


@pytest.fixture
def plain_hana() -> Iterator[int]:
    """A port that greets as a HANA without TLS does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        if len(connection.recv(14)) == 14:
                            connection.sendall(bytes.fromhex("0414000401000000"))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def found(patient: Patient) -> dict[str, SimpleNamespace]:
    return {check["check"]: SimpleNamespace(**check) for check in patient.doctor()}


def test_in_order_and_all_well(plain_hana: int) -> None:
    patient = Patient(
        hana={"host": "127.0.0.1", "port": plain_hana, "encrypt": False},
        collections=[{"name": "a", "source": "S.T", "template": "{X}"}],
    )
    done = patient.doctor()
    assert [check for check in done if not check["ok"]] == []
    assert [check["check"] for check in done] == [
        "python", "torch", "gpu", "kernels", "model", "settings",
        "hana dns", "hana tcp", "hana tls",
        "hana login", "hana rights", "table of a", "vector types", "store writable", "disk",
    ]  # fmt: skip
    assert "plain text" in found(patient)["hana tls"].detail


def test_a_closed_port_stops_what_builds_on_it() -> None:
    done = found(Patient(hana={"host": "127.0.0.1", "port": closed_port(), "encrypt": False}))
    assert not done["hana tcp"].ok
    assert "HANA_PORT" in done["hana tcp"].fix
    assert '"hana tcp" failed' in done["hana tls"].detail
    assert not done["hana tls"].ok
    assert not done["store writable"].ok


def test_two_hanas_are_checked_both(plain_hana: int) -> None:
    good = {"host": "127.0.0.1", "port": plain_hana, "encrypt": False}
    done = found(Patient(hana=good, store={"hana": good | {"port": closed_port()}}))
    assert done["hana login"].ok
    assert not done["store hana tcp"].ok
    assert "HANA_STORE_PORT" in done["store hana tcp"].fix
    assert not done["vector types"].ok


def test_a_userkey_needs_no_address() -> None:
    done = found(Patient(hana={"userkey": "OWL"}))
    assert "hana dns" not in done
    assert done["hana login"].ok


def test_errors_are_told_with_a_fix_and_unexpected_ones_without_their_text() -> None:
    class Ill(Patient):
        def probe_model(self) -> str:
            raise Known("no such model")

        def probe_store(self) -> str:
            raise KeyError("row text")

    done = found(Ill(store={"kind": "local", "path": "x"}))
    assert (done["model"].ok, done["model"].detail) == (False, "no such model")
    assert done["model"].fix
    assert "row text" not in done["store writable"].detail


# -------------------------------------------------------------------------------------------------------- this machine


def test_too_little_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "GiB free" in checks.disk(tmp_path / "not" / "yet")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 20))
    with pytest.raises(Fault, match="5 MiB"):
        checks.disk(tmp_path)


def card(name: str = "Tesla T4", driver: str = "580.95", **more: Any) -> GpuSnapshot:
    unknown: dict[str, Any] = dict.fromkeys(GpuState.__dataclass_fields__)
    known = {"index": 0, "name": name, "memory_total_bytes": 15 << 30, "compute_capability": "7.5"}
    return GpuSnapshot((GpuState(**unknown | known | more),), driver, "13")


def seen(monkeypatch: pytest.MonkeyPatch, found: GpuSnapshot, build: tuple[str, str | None] | None) -> None:
    monkeypatch.setattr(gpu, "snapshot_within", lambda seconds: found)
    monkeypatch.setattr(gpu, "torch_build", lambda: build)


NONE = GpuSnapshot(reason="there is no NVIDIA driver here")
CUDA_13, CUDA_12, CPU = ("2.13.0", "13.0"), ("2.10.0", "12.8"), ("2.13.0+cpu", None)
CUDA_12_6 = ("2.13.0+cu126", "12.6")


@pytest.mark.parametrize(
    ("driver", "build", "words", "fixes"),
    [
        ("470.223.02", CUDA_13, ["470.223.02", "too old", "CUDA 13.0", "580"], ["driver 580"]),
        ("535.54.03", CUDA_13, ["535.54.03", "580"], ["driver 580", "pip install 'torch=="]),
        ("470.223.02", CUDA_12, ["CUDA 12.8", "525"], ["driver 525"]),
    ],
)
def test_a_driver_too_old_for_this_torch(
    monkeypatch: pytest.MonkeyPatch, driver: str, build: tuple[str, str | None], words: list[str], fixes: list[str]
) -> None:
    seen(monkeypatch, card(driver=driver), build)
    with pytest.raises(Fault) as caught:
        gpu.torch(EmbeddingSettings())
    assert all(word in str(caught.value) for word in words)
    assert all(fix in caught.value.fix for fix in fixes)
    assert ("pip" in caught.value.fix) == (driver == "535.54.03"), "470 runs no torch of ours"
    assert "CUDA" in gpu.torch(EmbeddingSettings(device="cpu")), "no fault where the GPU is not wanted"


def test_a_torch_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, card(), CUDA_13)
    assert gpu.torch(EmbeddingSettings()) == "torch 2.13.0, built for CUDA 13.0"
    seen(monkeypatch, NONE, CUDA_13)
    assert "CUDA 13.0" in gpu.torch(EmbeddingSettings()), "the CUDA wheel runs on a machine without a GPU"
    seen(monkeypatch, NONE, CPU)
    assert "for the CPU" in gpu.torch(EmbeddingSettings())


def test_gpus_and_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [EmbeddingSettings(expect_gpu=True), EmbeddingSettings(device="cuda")]
    seen(monkeypatch, NONE, CUDA_13)
    assert "CPU is used" in gpu.gpu(EmbeddingSettings())
    for embedding in wanted:
        with pytest.raises(Fault, match="no NVIDIA driver") as caught:
            gpu.gpu(embedding)
        assert "--gpus all" in caught.value.fix
    seen(monkeypatch, card(), CPU)
    assert "not used" in gpu.gpu(EmbeddingSettings())
    for embedding in wanted:
        with pytest.raises(Fault) as caught:
            gpu.gpu(embedding)
        assert (
            "--force-reinstall 'torch==2.13.*' --index-url https://download.pytorch.org/whl/cu130" in caught.value.fix
        )
    seen(monkeypatch, card(driver="535.1"), CPU)
    with pytest.raises(Fault, match="for the CPU") as caught:
        gpu.gpu(wanted[0])
    assert "whl/cu12" in caught.value.fix, "what this driver runs"
    seen(monkeypatch, card(), CUDA_13)
    assert gpu.gpu(wanted[0]) == "Tesla T4 (15 GiB, compute capability 7.5); driver 580.95"


def test_what_the_card_does_is_told_and_heat_is_not_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    now: dict[str, Any] = {
        "utilization_percent": 98,
        "temperature_celsius": 71,
        "power_watts": 69.9,
        "power_limit_watts": 70.0,
    }
    seen(monkeypatch, card(**now, sm_clock_mhz=1005, throttle=throttles(4), throttled_abnormally=False), CUDA_13)
    told = gpu.gpu(EmbeddingSettings())
    assert "98 % busy, 71 C, 70 of 70 W, 1005 MHz; held by the power limit" in told
    assert "THROTTLED" not in told
    seen(monkeypatch, card(**now, throttle=throttles(0x40), throttled_abnormally=True), CUDA_13)
    assert "far too hot" in gpu.gpu(EmbeddingSettings())
    assert "THROTTLED" in gpu.gpu(EmbeddingSettings())
    seen(monkeypatch, card(reason="NVML: GPU is lost"), CUDA_13)
    assert "GPU 0 reports nothing: NVML: GPU is lost" in gpu.gpu(EmbeddingSettings())


CU126 = "pip install 'torch==2.13.*' --index-url https://download.pytorch.org/whl/cu126"
PLAIN = "pip install 'torch==2.13.*' (built for CUDA 13.0"


@pytest.mark.parametrize(
    ("name", "capability", "build", "fix"),
    [
        # With torch's ordinary wheel (CUDA 13), with the one for CUDA 12.6, with the older one for CUDA 12.8.
        ("Tesla P100", "6.0", CUDA_13, CU126),
        ("Tesla P100", "6.0", CUDA_12, CU126),
        ("Tesla P100", "6.0", CUDA_12_6, None),
        ("Tesla P4", "6.1", CUDA_13, CU126),
        ("Tesla P4", "6.1", CUDA_12, CU126),
        ("Tesla P4", "6.1", CUDA_12_6, None),
        ("Tesla V100", "7.0", CUDA_13, CU126),
        ("Tesla V100", "7.0", CUDA_12, None),
        ("Tesla V100", "7.0", CUDA_12_6, None),
        ("Tesla T4", "7.5", CUDA_13, None),
        ("Tesla T4", "7.5", CUDA_12, None),
        ("Tesla T4", "7.5", CUDA_12_6, None),
        ("NVIDIA A100", "8.0", CUDA_13, None),
        ("NVIDIA L4", "8.9", CUDA_13, None),
        ("NVIDIA L4", "8.9", CUDA_12_6, None),
        ("NVIDIA H100", "9.0", CUDA_13, None),
        ("NVIDIA B200", "10.0", CUDA_12_6, PLAIN),
    ],
)
def test_kernels_for_each_card(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: str, build: tuple[str, str | None], fix: str | None
) -> None:
    seen(monkeypatch, card(name, compute_capability=capability), build)
    if fix is None:
        told = gpu.kernels(EmbeddingSettings())
        assert told == f"torch {build[0]} (CUDA {build[1]}) supports {name} ({capability})"
        return
    with pytest.raises(Fault) as caught:
        gpu.kernels(EmbeddingSettings())
    assert f"{name} has compute capability {capability}, and torch {build[0]}" in str(caught.value)
    assert "has kernels for sm_" in str(caught.value)
    assert caught.value.fix.startswith(fix)
    if fix == CU126:
        assert all(word in caught.value.fix for word in ("up to torch 2.14", "driver 525 to 580"))


def test_kernels_where_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, card("Tesla P4", compute_capability="6.1"), CUDA_13)
    assert "hash:8 needs no GPU" in gpu.kernels(EmbeddingSettings(model="hash:8"))
    assert "CPU computes" in gpu.kernels(EmbeddingSettings(device="cpu"))
    seen(monkeypatch, card("Tesla P4", compute_capability="6.1"), CPU)
    assert CU126 in gpu.kernels(EmbeddingSettings()), "what would use the card"
    seen(monkeypatch, card(compute_capability=None), CUDA_13)
    assert "does not report" in gpu.kernels(EmbeddingSettings())
    seen(monkeypatch, card(), ("2.99", "15.1"))
    assert "unknown for torch" in gpu.kernels(EmbeddingSettings())
    seen(monkeypatch, NONE, CUDA_13)
    assert gpu.kernels(EmbeddingSettings()) == "no GPU found"


def test_the_card_that_the_settings_name_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    (old,), (new,) = card("Tesla P4", compute_capability="6.1").devices, card(index=1).devices
    seen(monkeypatch, GpuSnapshot((old, new), "580.95", "13"), CUDA_13)
    assert "Tesla T4" in gpu.kernels(EmbeddingSettings(device="cuda:1"))
    with pytest.raises(Fault, match="Tesla P4"):
        gpu.kernels(EmbeddingSettings())
    with pytest.raises(Fault, match="Tesla P4"):
        gpu.kernels(EmbeddingSettings(device="cuda:1,cuda:0"))
    assert "Tesla T4" in gpu.kernels(EmbeddingSettings(device="all")), "the other one is left out"
    seen(monkeypatch, GpuSnapshot((old,), "580.95", "13"), CUDA_13)
    with pytest.raises(Fault, match="Tesla P4"):
        gpu.kernels(EmbeddingSettings(device="all"))


@pytest.mark.parametrize(
    ("changes", "cards", "build", "reason", "fix"),
    [
        ({}, NONE, CUDA_13, "no NVIDIA driver", "--gpus all"),
        ({}, card(), CPU, "build for the CPU", "--force-reinstall"),
        ({}, card(), None, "torch is not installed", "[engine]"),
        ({}, card(driver="470.1"), CUDA_13, "too old", "driver 580"),
        ({}, card("Tesla P4", compute_capability="6.1"), CUDA_13, "6.1", "cu126"),
        ({"device": "cpu"}, card(), CUDA_13, 'device is "cpu"', "USE_GPU=false"),
        ({"model": "hash:8"}, card(), CUDA_13, "runs on CPUs only", "USE_GPU=false"),
        ({}, card(), CUDA_13, None, None),
    ],
)
def test_why_no_gpu(
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    cards: GpuSnapshot,
    build: tuple[str, str | None] | None,
    reason: str | None,
    fix: str | None,
) -> None:
    seen(monkeypatch, cards, build)
    fault = gpu.why_no_gpu(EmbeddingSettings(expect_gpu=True, **changes))
    if reason is None or fix is None:
        assert fault is None
        return
    assert fault is not None
    assert reason in str(fault)
    assert fix in fault.fix


def test_a_missing_package_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "hash:8 needs none" in gpu.torch(EmbeddingSettings(model="hash:8"))
    with pytest.raises(Fault) as caught:
        gpu.torch(EmbeddingSettings())
    assert "[engine]" in caught.value.fix


def test_torch_is_read_without_importing_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = tmp_path / "version.py"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "x.py")))
    version.write_text("from typing import Optional\n__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n")
    assert device.torch_build() == CUDA_13
    version.write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    assert device.torch_build() == CPU
    version.write_text("(")
    assert device.torch_build() == ("unknown", None)
    version.unlink()
    assert device.torch_build() == ("unknown", None)


# ----------------------------------------------------------------------------------- what is asked of HANA, with fakes


class Pool:
    """A pool whose calls fail as told; counts logins."""

    def __init__(self, login: Exception | None = None, execute: Callable[[str], int] = lambda sql: 0) -> None:
        self.login = login
        self.logins = 0
        self._execute = execute
        self.sent: list[str] = []

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        self.logins += 1
        if self.login is not None:
            raise self.login
        yield

    def execute(self, sql: str, parameters: object = (), *, doing: str = "") -> int:
        self.sent.append(sql)
        return self._execute(sql)

    def close(self) -> None:
        pass


LOGIN = {"host": "db.example", "port": 30015, "user": "tech", "password": "canary-84"}


def probes(monkeypatch: pytest.MonkeyPatch, pool: Pool, **document: object) -> Checks:
    settings = Settings.model_validate({"hana": LOGIN, "embedding": {"model": "hash:8"}} | document)
    monkeypatch.setattr(Parts, "pool", lambda self, section: pool)
    monkeypatch.setattr(HanaFeatures, "probe", lambda pool: HanaFeatures(True, True, "2025.15.0"))
    return Checks(Parts(settings))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (10, ["HANA_PASSWORD", "tried once", "lock"]),
        (416, ['ALTER USER "TECH" RESET CONNECT ATTEMPTS']),
        (414, ["new password", 'ALTER USER "TECH" DISABLE PASSWORD LIFETIME']),
    ],
)
def test_each_refused_login_has_its_own_fix(monkeypatch: pytest.MonkeyPatch, code: int, words: list[str]) -> None:
    pool = Pool(LoginRefused("login refused", code=code))
    examined = probes(monkeypatch, pool, store={"hana": LOGIN})
    for hana in (examined.settings.hana, examined.settings.store_hana):
        with pytest.raises(Fault, match="login refused") as caught:
            examined.probe_login(hana)
        assert all(word in caught.value.fix for word in words), caught.value.fix
        assert "canary-84" not in caught.value.fix
    assert pool.logins == 1, "the same user at the same place is not tried twice"


def test_a_key_that_is_not_found_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    examined = probes(monkeypatch, Pool(ConnectFailed("no such key", code=-10104)), hana={"userkey": "OWL"})
    with pytest.raises(Fault, match="no such key") as caught:
        examined.probe_login(examined.settings.hana)
    assert "hdbuserstore LIST" in caught.value.fix


def test_a_login_with_a_key_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(LoginRefused("login refused", code=10))
    examined = probes(monkeypatch, pool, hana={"userkey": "OWL"})
    with pytest.raises(Fault) as caught:
        examined.probe_login(examined.settings.hana)
    assert "hdbuserstore SET OWL" in caught.value.fix


def test_a_hana_without_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    half = probes(monkeypatch, Pool(), store={"vector_type": "half"})
    examined = probes(monkeypatch, Pool())
    assert examined.probe_vector_types() == "REAL_VECTOR, HALF_VECTOR"
    monkeypatch.setattr(HanaFeatures, "probe", lambda pool: HanaFeatures(True, False, "2024.2.0"))
    assert "no HALF_VECTOR" in examined.probe_vector_types()
    with pytest.raises(Fault, match="no HALF_VECTOR") as caught:
        half.probe_vector_types()
    assert 'vector_type = "real"' in caught.value.fix
    monkeypatch.setattr(HanaFeatures, "probe", lambda pool: HanaFeatures(False, False, "2.00.076.00"))
    with pytest.raises(Fault, match="no REAL_VECTOR") as caught:
        examined.probe_vector_types()
    assert 'kind = "local"' in caught.value.fix


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (PermissionRefused("no SELECT (code 258)", code=258), 'GRANT SELECT ON "S"."/BIC/T" TO "TECH"'),
        (
            UnknownTable("there is no table"),
            'correct [[collections]] a source; or, if it is right: GRANT SELECT ON "S"',
        ),
    ],
)
def test_a_table_that_may_not_be_read_names_the_grant(
    monkeypatch: pytest.MonkeyPatch, error: Exception, fix: str
) -> None:
    def describe(ref: object) -> object:
        raise error

    collection = {"name": "a", "source": "S./BIC/T", "template": "{X}"}
    examined = probes(monkeypatch, Pool(), collections=[collection])
    monkeypatch.setattr(Parts, "source", SimpleNamespace(describe=describe))
    with pytest.raises(Fault) as caught:
        examined.probe_table(examined.settings.collections[0])
    assert caught.value.fix.startswith(fix)


def test_a_delta_table_that_is_unknown_is_the_setting_to_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(ref: TableRef) -> object:
        if ref.name == "T":
            return SimpleNamespace(name="T")
        raise UnknownTable(f"there is no table {ref}")

    changes = {"method": "delta", "table": "S.MISSING"}
    examined = probes(
        monkeypatch, Pool(), collections=[{"name": "a", "source": "S.T", "template": "{X}", "changes": changes}]
    )
    monkeypatch.setattr(Parts, "source", SimpleNamespace(describe=describe))
    with pytest.raises(Fault, match=r"no table S\.MISSING") as caught:
        examined.probe_table(examined.settings.collections[0])
    assert caught.value.fix == (
        'correct [[collections]] a changes.table; or, if it is right: GRANT SELECT ON "S"."MISSING" TO "TECH"'
    )


def refusing(word: str, error: DatabaseError) -> Callable[[str], int]:
    def execute(sql: str) -> int:
        if sql.startswith(word):
            raise error
        return 0

    return execute


def test_a_schema_without_the_right_to_create(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = refusing("CREATE TABLE", PermissionRefused("code 258", code=258))
    refused_column = refusing("CREATE COLUMN TABLE", PermissionRefused("code 258", code=258))
    pool = Pool(execute=lambda sql: refused(sql) + refused_column(sql))
    examined = probes(monkeypatch, pool, store={"schema": "VECTORS"})
    monkeypatch.setattr(Checks, "_store_answers", lambda self: None)
    with pytest.raises(Fault) as caught:
        examined.probe_store()
    assert caught.value.fix == 'GRANT CREATE ANY ON SCHEMA "VECTORS" TO "TECH"'


def test_a_schema_with_the_tables_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Checks) -> None:
        raise PermissionRefused("no SELECT on VECTORS.OWL_STATE", code=258)

    examined = probes(monkeypatch, Pool(), store={"schema": "VECTORS"})
    monkeypatch.setattr(Checks, "_store_answers", refused)
    with pytest.raises(Fault) as caught:
        examined.probe_store()
    for rights in ("CREATE ANY", "SELECT, INSERT, UPDATE, DELETE"):
        assert f'GRANT {rights} ON SCHEMA "VECTORS" TO "TECH"' in caught.value.fix


def test_a_schema_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(self: Checks) -> None:
        raise UnknownTable("the schema does not exist")

    examined = probes(monkeypatch, Pool(), store={"schema": "VECTORS"}, hana=LOGIN | {"user": 'o"dd'})
    monkeypatch.setattr(Checks, "_store_answers", absent)
    with pytest.raises(Fault) as caught:
        examined.probe_store()
    assert caught.value.fix.startswith('CREATE SCHEMA "VECTORS" OWNED BY "o""dd"')


def test_a_store_without_a_schema_says_which_setting_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    examined = probes(monkeypatch, Pool())
    with pytest.raises(ConfigurationError, match=r"no schema for the vectors: set \[store\] schema"):
        examined.probe_store()


def test_a_store_is_tried_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    examined = probes(monkeypatch, pool, store={"schema": "VECTORS"})
    monkeypatch.setattr(Checks, "_store_answers", lambda self: None)
    assert "can be made and written" in examined.probe_store()
    assert [sql.split()[0] for sql in pool.sent] == ["CREATE", "DROP", "UPDATE"]


def test_a_model_on_the_cpu_where_a_gpu_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    examined = probes(monkeypatch, Pool())
    detail = examined.probe_model()
    assert "8 dimensions" in detail
    assert "path hashing" in detail
    assert gpu_missing(examined.settings.embedding, examined._parts.engine) is None, "nobody asked"
    monkeypatch.setattr(Parts, "embedder", examined._parts.embedder)
    embedding = examined.settings.embedding.model_copy(update={"model": "own", "expect_gpu": True})
    examined._parts.settings = examined.settings.model_copy(update={"embedding": embedding})
    seen(monkeypatch, card(), CUDA_13)
    with pytest.raises(Fault, match="a GPU is required, but hash:8 runs on the CPU: torch sees no CUDA") as caught:
        examined.probe_choices()
    assert "CUDA_VISIBLE_DEVICES" in caught.value.fix
    assert "8 dimensions" in examined.probe_model(), "what builds on the model is looked at all the same"
    assert gpu_missing(examined.settings.embedding, None) is None, (
        "before anything is loaded, all that is installed here fits"
    )


def the_reranker(folder: Path, fails: str = "", **settings: Any) -> SimpleNamespace:
    """Doctor's line about it. `fails`: why it gives no scores."""
    store = {"kind": "local", "path": folder / "vectors"}
    given = {"store": store, "embedding": {"model": "hash:8"}} | settings
    with contextlib.closing(Service(Settings.model_validate(given))) as service:
        if fails:
            service.reranker._score = mock.Mock(side_effect=RerankFailed(fails))
        (found,) = [each for each in service.readiness.doctor() if each["check"] == "reranker"] or [{"ok": None}]
        return SimpleNamespace(**found)


def test_a_reranker_is_tried(tmp_path: Path) -> None:
    told = the_reranker(tmp_path, search={"rerank": "tests.reranker:scores"})
    assert told.ok
    assert told.detail.startswith("function tests.reranker:scores: two texts in ")
    assert the_reranker(tmp_path).ok is None, "there is none"


def test_a_reranker_elsewhere_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = {"rerank": "https://api.example/v1/rerank", "rerank_model": "rerank-v3", "rerank_key": "canary-84"}
    told = the_reranker(tmp_path, "api.example answered with HTTP 401", search=search)
    assert (told.ok, told.detail) == (False, "api.example answered with HTTP 401")
    assert "rerank_key" in told.fix
    monkeypatch.setattr(Reranker, "probe", lambda self: 0.25)
    told = the_reranker(tmp_path, search=search)
    assert told.detail.startswith("http rerank-v3: two texts in 250 ms; SENDS TEXTS AWAY: ")
    assert told.detail.endswith(" go to api.example")
    assert "canary-84" not in told.detail


def test_a_slow_reranker_gets_the_limit_as_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = RerankFailed("it took longer than 2 s ([search] rerank_seconds)", outcome="timeout")
    monkeypatch.setattr(Reranker, "probe", mock.Mock(side_effect=late))
    told = the_reranker(tmp_path, search={"rerank": "tests.reranker:scores"})
    assert (told.ok, told.detail) == (False, str(late))
    assert told.fix.startswith("raise [search] rerank_seconds")


def test_a_reranker_in_hana_waits_for_the_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search, hana = {"rerank": "hana:SAP_CER.20250701"}, LOGIN | {"host": "127.0.0.1", "port": closed_port()}
    assert the_reranker(tmp_path, "never asked", search=search, hana=hana).detail == (
        'not checked: "hana login" failed'
    )
    for name in ("dns", "tcp", "tls"):
        monkeypatch.setattr(Network, name, lambda self: "there")
    for name in ("probe_login", "probe_rights"):
        monkeypatch.setattr(Checks, name, lambda self, hana: "in")
    told = the_reranker(tmp_path, "HANA refuses CROSS_ENCODE (code 258)", search=search, hana=hana)
    assert told.detail == "HANA refuses CROSS_ENCODE (code 258)"
    assert "SAP HANA Cloud Central" in told.fix


def test_the_chosen_settings_are_told_with_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    examined = probes(monkeypatch, Pool())
    assert examined.probe_choices().startswith("precision fp32: ")
    assert "path hashing: " in examined.probe_choices()

"""What a person in trouble checks first, in order, each line with its fix. Looks at the machine, the settings and the
parts the service hands it; builds nothing itself and never prints a secret.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import shutil
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from app.src.settings import CollectionSettings, HanaSettings, Settings

MINIMUM_FREE = 1 << 30
_CERTIFICATE_WARNING = 14 * 86_400


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `fix` is empty when `ok`."""

    check: str
    ok: bool
    detail: str
    fix: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Fault(Exception):
    """A probe found something wrong: what, and what to do."""

    def __init__(self, detail: str, fix: str) -> None:
        super().__init__(detail)
        self.fix = fix


Probe = Callable[[], str]
"""Returns the detail of a line that is ok; raises Fault, or an error whose message may be shown."""


class Patient(Protocol):
    """What `probes` offers for looking at. Each call may raise the errors of connector and engine."""

    @property
    def settings(self) -> Settings: ...

    @property
    def expected_errors(self) -> tuple[type[Exception], ...]: ...

    def probe_model(self) -> str: ...

    def probe_login(self, hana: HanaSettings) -> str: ...

    def probe_vector_types(self) -> str: ...

    def probe_table(self, collection: CollectionSettings) -> str: ...

    def probe_store(self) -> str: ...


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    probe: Probe
    needs: tuple[str, ...] = ()
    fix: str = ""


def examine(patient: Patient) -> list[Check]:
    """Run every check that makes sense for these settings. A failed prerequisite marks its dependants as skipped."""
    done: dict[str, Check] = {}
    for step in _steps(patient):
        done[step.name] = _run(step, done, patient.expected_errors)
    return list(done.values())


def _run(step: _Step, done: Mapping[str, Check], expected: tuple[type[Exception], ...]) -> Check:
    for needed in step.needs:
        if needed in done and not done[needed].ok:
            return Check(step.name, False, f'not checked: "{needed}" failed', f'mend "{needed}" first')
    try:
        return Check(step.name, True, step.probe())
    except Fault as fault:
        return Check(step.name, False, str(fault), fault.fix)
    except expected as error:
        return Check(step.name, False, str(error), step.fix or "see the message")
    except Exception as error:
        return Check(step.name, False, f"unexpected error: {type(error).__name__}", step.fix or "please report it")


def _steps(patient: Patient) -> Iterator[_Step]:
    settings = patient.settings
    yield _Step("python", _python)
    yield _Step("torch", lambda: _torch(settings))
    yield _Step("gpu", lambda: _gpu(settings))
    yield _Step("model", patient.probe_model, ("torch",), "check [embedding] model")
    if settings.hana.configured or settings.collections or settings.store.kind == "hana":
        yield _Step("hdbcli", _hdbcli)
        yield from _hana_steps("hana", settings.hana, patient)
    if settings.store.kind == "hana" and settings.store.hana is not None:
        yield from _hana_steps("store hana", settings.store.hana, patient)
    for collection in settings.collections:
        yield _Step(
            f"table of {collection.name}",
            functools.partial(patient.probe_table, collection),
            ("hana login", "model"),
            f"correct [[collections]] {collection.name}, or GRANT SELECT ON {collection.source} to the technical user",
        )
    yield from _store_steps(settings, patient)


def _store_steps(settings: Settings, patient: Patient) -> Iterator[_Step]:
    if settings.store.kind == "hana":
        login = "store hana login" if settings.store.hana is not None else "hana login"
        schema = settings.store_schema
        fix = f'create the schema, or GRANT CREATE ANY ON SCHEMA "{schema}"' if schema else "set [store] schema"
        yield _Step("vector types", patient.probe_vector_types, (login,), 'use [store] kind = "local" on this HANA')
        yield _Step("store writable", patient.probe_store, ("vector types",), fix)
    else:
        yield _Step("store writable", patient.probe_store, (), "check [store] path and its rights")
    yield _Step("disk", lambda: _disk(settings.store.path or Path()))


def _hana_steps(label: str, hana: HanaSettings, patient: Patient) -> Iterator[_Step]:
    if not hana.userkey or hana.host:
        yield _Step(f"{label} address", lambda: _configured(hana))
        yield _Step(f"{label} dns", lambda: _dns(hana), (f"{label} address",))
        yield _Step(f"{label} tcp", lambda: _tcp(hana), (f"{label} dns",))
        yield _Step(f"{label} tls", lambda: _tls(hana), (f"{label} tcp",))
    needs = ("hdbcli", f"{label} tls")
    yield _Step(f"{label} login", lambda: patient.probe_login(hana), needs, "check user, password and port")


# ------------------------------------------------------------------------------------------------------------- probes


def _python() -> str:
    # An older one than 3.11 cannot get this far.
    return f"Python {'.'.join(str(part) for part in sys.version_info[:3])}"


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package) if importlib.util.find_spec(package) else None
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _torch(settings: Settings) -> str:
    version = _installed("torch")
    if version is None and settings.embedding.hashing:
        return f"not installed; {settings.embedding.model} needs none"
    if version is None:
        raise Fault("torch is not installed", "pip install 'owl-sap-connector[engine]'")
    return f"torch {version}"


def _hdbcli() -> str:
    version = _installed("hdbcli")
    if version is None:
        raise Fault("SAP's driver hdbcli is not installed", "pip install 'owl-sap-connector[hana]' (SAP's licence)")
    return f"hdbcli {version}"


def _gpu(settings: Settings) -> str:
    found = _nvidia_devices()
    if found is None and (settings.embedding.expect_gpu or settings.embedding.device.startswith("cuda")):
        raise Fault("a GPU is asked for, but there is no NVIDIA driver or card", "install the driver, or USE_GPU=false")
    return found or "no NVIDIA GPU; the CPU is used"


def _nvidia_devices() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # NVML missing, no driver, no rights: all the same here
        return None
    try:
        names = [
            pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())
        ]
        driver = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return f"{', '.join(str(name) for name in names)}; driver {driver}" if names else None


def _configured(hana: HanaSettings) -> str:
    if not hana.host:
        raise Fault("no HANA host is set", "set [hana] host in owl-sap.toml, or HANA_HOST")
    return f"{hana.host}:{hana.port}"


def _dns(hana: HanaSettings) -> str:
    try:
        found = socket.getaddrinfo(hana.host, hana.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise Fault(f"the name {hana.host} cannot be resolved", "check HANA_HOST and this machine's DNS") from None
    return f"{hana.host} is {', '.join(sorted({str(address[4][0]) for address in found}))}"


def _tcp(hana: HanaSettings) -> str:
    start = time.perf_counter()
    try:
        _connect(hana).close()
    except OSError as error:
        raise Fault(
            f"{hana.host}:{hana.port} cannot be reached ({type(error).__name__})",
            "check HANA_PORT (443 Cloud, 3NN13 or 3NN15 on-premise), firewall, and whether the instance runs",
        ) from None
    return f"connected in {(time.perf_counter() - start) * 1000:.0f} ms"


def _connect(hana: HanaSettings) -> socket.socket:
    return socket.create_connection((hana.host or "", hana.port), timeout=hana.connect_timeout)


def _tls(hana: HanaSettings) -> str:
    if not hana.encrypt:
        return "off (encrypt = false): everything, the login too, crosses the network in plain text"
    context = _context(hana)
    name = hana.host_name_in_certificate or hana.host
    try:
        with _connect(hana) as plain, context.wrap_socket(plain, server_hostname=name) as secured:
            return f"{secured.version()}, {_expiry(secured)}"
    except ssl.SSLCertVerificationError as error:
        raise Fault(
            f"the certificate is not accepted: {error.verify_message}",
            "set HANA_SSL_TRUST_STORE to the PEM of its authority, or host_name_in_certificate",
        ) from None
    except OSError as error:
        raise Fault(
            f"the server does not speak TLS on this port ({type(error).__name__})",
            "check the port; a HANA without TLS needs encrypt = false, written by name",
        ) from None


def _context(hana: HanaSettings) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if hana.trust_store and hana.trust_store.lstrip().startswith("-----"):
        context.load_verify_locations(cadata=hana.trust_store)
    elif hana.trust_store:
        if not Path(hana.trust_store).is_file():
            raise Fault(f"the trust store {hana.trust_store} does not exist", "correct HANA_SSL_TRUST_STORE")
        context.load_verify_locations(cafile=hana.trust_store)
    if not hana.validate_certificate:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif hana.host_name_in_certificate == "*":
        context.check_hostname = False
    return context


def _expiry(secured: ssl.SSLSocket) -> str:
    until = (secured.getpeercert() or {}).get("notAfter")
    if not isinstance(until, str):
        return "certificate not validated (validate_certificate = false)"
    left = ssl.cert_time_to_seconds(until) - time.time()
    if left < _CERTIFICATE_WARNING:
        raise Fault(f"the certificate ends on {until}", "have it renewed before it stops every connection")
    return f"certificate valid until {until}"


def _disk(path: Path) -> str:
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < MINIMUM_FREE:
        raise Fault(f"{free >> 20} MiB free at {existing}", "free at least 1 GiB, or move to another disk")
    return f"{free >> 30} GiB free at {existing}"

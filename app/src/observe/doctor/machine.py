"""Doctor's look at this machine: packages, driver and cards, disk, the port of `serve`, proxies, SAP's user store."""

from __future__ import annotations

import errno
import http.client
import importlib.metadata
import importlib.util
import json
import shutil
import socket
import ssl
import sys
from pathlib import Path

from app.src.core.cards import BUILDS, Capability, builds_for, kernels_exist, torch_build, what_to_install
from app.src.core.nvml import GpuSnapshot, GpuState, driver_too_old, snapshot_within, summary
from app.src.observe.doctor.report import Fault
from app.src.settings import ApiSettings, EmbeddingSettings, proxy_variables
from connector.extras import install_command

MINIMUM_FREE = 1 << 30
_PATIENCE = 2.0
"""Seconds for NVIDIA's driver, which may hang."""
_PYTORCH = "https://download.pytorch.org/whl"
_NO_CARD = "install the NVIDIA driver (in a container: start it with --gpus all), or USE_GPU=false"


def python() -> str:
    # An older one than 3.11 cannot get this far.
    return f"Python {'.'.join(str(part) for part in sys.version_info[:3])}"


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package) if importlib.util.find_spec(package) else None
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def hdbcli() -> str:
    version = _installed("hdbcli")
    if version is None:
        raise Fault("SAP's driver hdbcli is not installed", f"{install_command('hana')} (SAP's licence)")
    return f"hdbcli {version}"


# --------------------------------------------------------------------------------------------------------- torch, cards


def look() -> GpuSnapshot:
    return snapshot_within(_PATIENCE)


def torch(embedding: EmbeddingSettings, found: GpuSnapshot | None = None) -> str:
    """Installed, and does the driver run its CUDA build? Read from files: importing it is the model's business."""
    build = torch_build()
    if build is None and embedding.hashing:
        return f"not installed; {embedding.model} needs none"
    if build is None:
        raise Fault("torch is not installed", install_command("engine"))
    if build.cuda is None:
        return f"torch {build.version}, a build for the CPU"
    found = found or look()
    driver = found.driver_version
    floor = driver_too_old(driver, build.cuda) if driver and not _cpu_only(embedding) else None
    if floor is not None:
        raise Fault(
            f"driver {driver} is too old for this torch {build.version} (built for CUDA {build.cuda}, which needs "
            f"driver {floor} or newer): the GPU would not be used",
            _driver_fix(found, floor),
        )
    return f"torch {build.version}, built for CUDA {build.cuda}"


def _driver_fix(found: GpuSnapshot, floor: int) -> str:
    """Another driver, or a torch that this driver and every card here take."""
    branch = _branch(found)
    shared = [build for build in BUILDS if branch is not None and build.driver <= branch]
    for device in found.devices:
        if (capability := _capability(device)) is not None:
            shared = [build for build in shared if build in builds_for(capability)]
    other = f", or an older torch: {shared[0].command}" if shared else ""
    return f'install NVIDIA driver {floor} or newer{other}; or [embedding] device = "cpu"'


def _cpu_only(embedding: EmbeddingSettings) -> bool:
    return embedding.hashing or embedding.device == "cpu"


def gpu(embedding: EmbeddingSettings, found: GpuSnapshot | None = None) -> str:
    """The cards, and what they do now."""
    found = found or look()
    wanted = embedding.expect_gpu or embedding.device.startswith("cuda")
    if not found.devices:
        if wanted:
            raise Fault(f"a GPU is required, but {found.reason}", _NO_CARD)
        return f"the CPU is used: {found.reason}"
    build = torch_build()
    if build is not None and build.cuda is None and not embedding.hashing:
        if wanted:
            raise Fault(
                f"torch {build.version} is a build for the CPU and cannot use {_cards(found)}", _cuda_fix(found)
            )
        return f"{_cards(found)}; not used, torch is a build for the CPU"
    return _cards(found)


def _cuda_fix(found: GpuSnapshot) -> str:
    """Forced, for pip leaves a build for the CPU where its version fits; from an index that has no such build."""
    capability = next((each for each in map(_capability, found.devices) if each is not None), (7, 5))
    builds = builds_for(capability, _branch(found))
    if not builds:
        return what_to_install(capability, _branch(found))
    index = "" if builds[0].index else f" --index-url {_PYTORCH}/cu{builds[0].cuda.replace('.', '')}"
    return f"install the CUDA build: {builds[0].command.replace('install', 'install --force-reinstall', 1)}{index}"


def _cards(found: GpuSnapshot) -> str:
    return f"{'; '.join(map(_card, found.devices))}; driver {found.driver_version}"


def _card(device: GpuState) -> str:
    if device.reason is not None:
        return f"GPU {device.index} reports nothing: {device.reason}"
    known = [
        f"{device.memory_total_bytes / (1 << 30):.0f} GiB" if device.memory_total_bytes else "",
        f"compute capability {device.compute_capability}" if device.compute_capability else "",
        summary(device),
    ]
    told = ", ".join(part for part in known if part)
    warning = "; THROTTLED: heat or the power supply slows it down" if device.throttled_abnormally else ""
    return device.name + (f" ({told})" if told else "") + warning


def kernels(embedding: EmbeddingSettings, found: GpuSnapshot | None = None) -> str:
    """Has the installed torch kernels for the card? Without them the model does not load; by the published wheels, for
    asking torch takes seconds."""
    if _cpu_only(embedding):
        return "the CPU computes" if not embedding.hashing else f"{embedding.model} needs no GPU"
    found, build = found or look(), torch_build()
    if not found.devices or build is None:
        return "no GPU found" if not found.devices else "torch is not installed"
    card = next((each for each in found.devices if each.index == _index(embedding)), found.devices[0])
    capability = _capability(card)
    if capability is None:
        return f"{card.name} does not report its compute capability; loading the model will show"
    to_do = what_to_install(capability, _branch(found))
    if build.cuda is None:
        return f"torch is a build for the CPU; for {card.name} (compute capability {card.compute_capability}): {to_do}"
    built_for = next((each.architectures for each in BUILDS if each.cuda == _minor(build.cuda)), ())
    if not built_for:
        return f"unknown for torch {build.version} (CUDA {build.cuda}); loading the model will show"
    if not kernels_exist(built_for, capability):
        raise Fault(
            f"{card.name} has compute capability {card.compute_capability}, and torch {build.version} (CUDA "
            f"{build.cuda}) has kernels for {', '.join(built_for)} only",
            to_do,
        )
    return f"torch {build.version} (CUDA {build.cuda}) supports {card.name} ({card.compute_capability})"


def _index(embedding: EmbeddingSettings) -> int:
    number = embedding.device.partition(":")[2]
    return int(number) if number.isdecimal() else 0


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _capability(device: GpuState) -> Capability | None:
    major, _, minor = (device.compute_capability or "").partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def _branch(found: GpuSnapshot) -> int | None:
    branch = (found.driver_version or "").partition(".")[0]
    return int(branch) if branch.isdecimal() else None


def why_no_gpu(embedding: EmbeddingSettings) -> Fault | None:
    """What keeps the CPU computing, as far as settings, driver and packages tell; None: nothing that they know of."""
    if embedding.hashing:
        return Fault(
            f"the model {embedding.model} runs on CPUs only", "choose another [embedding] model, or USE_GPU=false"
        )
    if embedding.device == "cpu":
        return Fault('[embedding] device is "cpu"', 'device = "auto", or USE_GPU=false')
    found = look()
    if not found.devices:
        return Fault(str(found.reason), _NO_CARD)
    for check in (torch, gpu, kernels):
        try:
            check(embedding, found)
        except Fault as fault:
            return fault
    return None


# -------------------------------------------------------------------------------------------------- disk, port, proxies


def disk(path: Path) -> str:
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < MINIMUM_FREE:
        raise Fault(f"{free >> 20} MiB free at {existing}", "free at least 1 GiB, or move to another disk")
    return f"{free >> 30} GiB free at {existing}"


def port(api: ApiSettings) -> str:
    """Can `serve` listen? Our own service that is up already is no fault."""
    place = f"{api.host}:{api.port}"
    if api.port == 0:
        return "serve will choose a free port"
    try:
        family, _, _, _, address = socket.getaddrinfo(api.host, api.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except socket.gaierror:
        raise Fault(f"{api.host} is not an address of this machine", "correct [api] host") from None
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise Fault(f"cannot listen on {place} ({error.strerror})", "choose another [api] host or port") from None
        return _who_answers(api)
    return f"{place} is free"


def _who_answers(api: ApiSettings) -> str:
    """Looks by one harmless request."""
    host, number = api.host, api.port
    connection = http.client.HTTPConnection(host, number, timeout=2)
    if api.tls_certificate is not None:
        own = ssl.create_default_context()  # whose certificate it is does not matter for what is asked here
        own.check_hostname, own.verify_mode = False, ssl.CERT_NONE  # nosemgrep: owl-certificate-unchecked - see above
        connection = http.client.HTTPSConnection(host, number, timeout=2, context=own)
    who = "another program"
    try:
        connection.request("GET", "/health/live")
        answer = connection.getresponse()
        who = "another web server"
        if answer.getheader("X-Request-Id") and set(json.loads(answer.read(1000))) >= {"status", "checks"}:
            return f"an owl-sap service already runs at {host}:{number}"
    except (OSError, http.client.HTTPException, ValueError, TypeError):
        pass
    finally:
        connection.close()
    raise Fault(
        f"{host}:{number} is used by {who}",
        f"stop it (`ss -ltnp sport = :{number}` shows which it is), or choose another [api] port (OWL_SAP_API__PORT)",
    )


def proxies() -> str:
    """Never a fault, and a thing to know. Shows names only: values may hold passwords."""
    names, spared = proxy_variables()
    if not names:
        return "none set"
    told = f"{', '.join(names)} set; SAP's driver ignores it, so HANA must be reachable directly"
    if not {"127.0.0.1", "*"} & set(spared):
        told += "; add 127.0.0.1,localhost to NO_PROXY so that curl reaches the local service"
    return told


def user_store(key: str) -> str:
    """SAP's secure user store of this user of the operating system: a folder per host name."""
    stores = sorted(Path.home().glob(".hdb/*/SSFS_HDB.DAT"))
    if not stores:
        raise Fault(
            f"this user has no secure user store (no {Path.home() / '.hdb'}/HOST/SSFS_HDB.DAT), so no key {key}",
            f"as this user of the operating system: hdbuserstore SET {key} HOST:PORT USER PASSWORD "
            "(it comes with SAP's HANA client)",
        )
    return f"{', '.join(str(store.parent) for store in stores)}; key {key} is looked up when logging in"

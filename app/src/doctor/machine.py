"""Doctor's look at this machine: packages, driver and cards, disk, the port of `serve`, proxies, SAP's user store."""

from __future__ import annotations

import errno
import http.client
import importlib.metadata
import importlib.util
import json
import shutil
import socket
import sys
from pathlib import Path

from app.src.core.device import torch_build
from app.src.core.nvml import GpuSnapshot, driver_too_old, snapshot
from app.src.doctor.report import Fault
from app.src.settings import ApiSettings, EmbeddingSettings, proxy_variables

MINIMUM_FREE = 1 << 30
_OLDER_TORCH = ("2.10", 525)
"""The newest torch built for CUDA 12 on PyPI, and the driver it needs."""


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
        raise Fault("SAP's driver hdbcli is not installed", "pip install 'owl-sap-connector[hana]' (SAP's licence)")
    return f"hdbcli {version}"


# --------------------------------------------------------------------------------------------------------- torch, cards


def torch(embedding: EmbeddingSettings) -> str:
    """Installed, and does the driver run its CUDA build? Read from files: importing it is the model's business."""
    build = torch_build()
    if build is None and embedding.hashing:
        return f"not installed; {embedding.model} needs none"
    if build is None:
        raise Fault("torch is not installed", "pip install 'owl-sap-connector[engine]'")
    if build.cuda is None:
        return f"torch {build.version}, a build for the CPU"
    driver = snapshot().driver_version
    floor = driver_too_old(driver, build.cuda) if driver and not _cpu_only(embedding) else None
    if floor is not None:
        raise Fault(
            f"driver {driver} is too old for this torch {build.version} (built for CUDA {build.cuda}, which needs "
            f"driver {floor} or newer): the GPU would not be used",
            _driver_fix(driver or "", floor),
        )
    return f"torch {build.version}, built for CUDA {build.cuda}"


def _driver_fix(driver: str, floor: int) -> str:
    older, needs = _OLDER_TORCH
    other = f", or an older torch: pip install 'torch=={older}.*'"
    fits = floor > needs and driver_too_old(driver, "12.0") is None
    return f'install NVIDIA driver {floor} or newer{other if fits else ""}; or [embedding] device = "cpu"'


def _cpu_only(embedding: EmbeddingSettings) -> bool:
    return embedding.hashing or embedding.device == "cpu"


def gpu(embedding: EmbeddingSettings) -> str:
    found = snapshot()
    wanted = embedding.expect_gpu or embedding.device.startswith("cuda")
    if not found.devices:
        if wanted:
            raise Fault(f"a GPU is asked for, but {found.reason}", "install the driver, or USE_GPU=false")
        return f"the CPU is used: {found.reason}"
    build = torch_build()
    if build is not None and build.cuda is None and not embedding.hashing:
        if wanted:
            raise Fault(
                f"torch {build.version} is a build for the CPU and cannot use {_cards(found)}",
                "install the CUDA build: pip install --force-reinstall torch --index-url "
                "https://download.pytorch.org/whl/cu130",
            )
        return f"{_cards(found)}; not used, torch is a build for the CPU"
    return _cards(found)


def _cards(found: GpuSnapshot) -> str:
    cards = [
        device.name + (f" ({device.memory_total_bytes / (1 << 30):.0f} GiB)" if device.memory_total_bytes else "")
        for device in found.devices
    ]
    return f"{', '.join(cards)}; driver {found.driver_version}"


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
        return "serve takes any free port"
    try:
        family, _, _, _, address = socket.getaddrinfo(api.host, api.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except socket.gaierror:
        raise Fault(f"{api.host} is no address of this machine", "correct [api] host") from None
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise Fault(f"{place} cannot be bound ({error.strerror})", "choose another [api] host or port") from None
        return _who_answers(api.host, api.port)
    return f"{place} is free"


def _who_answers(host: str, number: int) -> str:
    """Looks by one harmless request."""
    connection = http.client.HTTPConnection(host, number, timeout=2)
    who = "another program"
    try:
        connection.request("GET", "/health/live")
        answer = connection.getresponse()
        who = "another web server"
        if answer.getheader("X-Request-Id") and set(json.loads(answer.read(1000))) == {"status", "checks"}:
            return f"our own service answers at {host}:{number}"
    except (OSError, http.client.HTTPException, ValueError, TypeError):
        pass
    finally:
        connection.close()
    raise Fault(
        f"{host}:{number} is taken by {who}",
        f"end it (`ss -ltnp sport = :{number}` shows which it is), or choose another [api] port (OWL_SAP_API__PORT)",
    )


def proxies() -> str:
    """Never a fault, and a thing to know. Shows names only: values may hold passwords."""
    names, spared = proxy_variables()
    if not names:
        return "none set"
    told = f"{', '.join(names)} set: SAP's driver does not use it, so HANA must be reachable directly"
    if not {"127.0.0.1", "*"} & set(spared):
        told += "; add 127.0.0.1,localhost to NO_PROXY, or curl asks the proxy for our service"
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

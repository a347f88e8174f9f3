"""Lock the requirements of the container image by hash (deployment/requirements), with uv, from pyproject.toml and
PyPI's metadata. Also checks, without a network, that the locks still match pyproject.toml.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deployment" / "requirements"
PYTHON, PLATFORM = "3.11", "x86_64-manylinux_2_28"  # of the image; Debian 12 and later run manylinux_2_28
BASE = ("hana", "engine", "serve")
# The values of EXTRAS= of Dockerfile.t4. Not `tensorrt`: its build script fetches libraries without checking hashes.
EXTRAS = ("mcp", "multilingual", "multilingual-e5", "onnx", "ray", "train")
# By the wheel's CUDA version. 13 needs driver 580, 12 (12.8) driver 525; both contain kernels for the T4 (sm_75).
# torch 2.13 asks for nvjitlink>=13.0.88,<14 (by cuda-toolkit 13.0.3) and pins all other libraries. The constraint keeps
# nvjitlink on the line that torch was built and tested with.
TORCH: Mapping[str, tuple[str, ...]] = {"13": ("torch==2.13.*", "nvidia-nvjitlink==13.0.*"), "12": ("torch==2.10.*",)}
COOLING = timedelta(days=3)  # age of a release after which most hijacked releases have been found
BUILD = "build.txt"
ENVIRONMENT = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "platform_machine": "x86_64",
    "platform_system": "Linux",
    "sys_platform": "linux",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
}
_MARK = "# From pyproject.toml: sha256:"


@dataclass(frozen=True, slots=True)
class Pin:
    """One locked package; `lines` of the file, with the hashes."""

    name: str
    version: Version
    hashes: tuple[str, ...]
    lines: tuple[str, ...]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def digest(pyproject: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything that determines the locks."""
    metadata = pyproject["project"]
    known = {
        "python": metadata["requires-python"],
        "dependencies": metadata["dependencies"],
        "extras": {name: metadata["optional-dependencies"][name] for name in (*BASE, *EXTRAS)},
        "build": pyproject["build-system"]["requires"],
        "torch": dict(TORCH),
        "platform": [PYTHON, PLATFORM],
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def names() -> list[str]:
    """Return the names of all lock files."""
    variants = (name for cuda in TORCH for name in (f"cuda{cuda}.txt", *(f"cuda{cuda}-{each}.txt" for each in EXTRAS)))
    return [*variants, BUILD]


def wanted(pyproject: Mapping[str, Any], extras: Iterable[str]) -> list[Requirement]:
    """Return the requirements of pyproject.toml with these extras on the image's platform, without the project."""
    metadata = pyproject["project"]
    lines = list(metadata["dependencies"])
    for extra in extras:
        lines += metadata["optional-dependencies"][extra]
    found = [Requirement(line) for line in lines]
    own = canonicalize_name(metadata["name"])
    return [
        each
        for each in found
        if canonicalize_name(each.name) != own and (each.marker is None or each.marker.evaluate(ENVIRONMENT))
    ]


def pins(text: str) -> dict[str, Pin]:
    """Return the packages of a lock file by canonical name. Raises ValueError for a line that is not a pin or hash."""
    found: dict[str, Pin] = {}
    block: list[str] = []
    for line in (*text.splitlines(), ""):
        if line.startswith("#"):
            continue
        if block and not line.startswith(" "):
            head, *rest = (each.rstrip("\\").strip() for each in block)
            name, equals, number = head.partition("==")
            hashes = tuple(each.removeprefix("--hash=") for each in rest)
            if not equals or not all(each.startswith("--hash=sha256:") for each in rest):
                raise ValueError(f"not a pinned requirement with hashes: {head}")
            found[canonicalize_name(name)] = Pin(canonicalize_name(name), Version(number), hashes, tuple(block))
            block = []
        if line:
            block.append(line)
    return found


def stale(folder: Path = FOLDER) -> list[str]:
    """Return a sentence for each lock that does not match pyproject.toml."""
    current = digest(project())
    faults = []
    for name in names():
        file = folder / name
        if not file.is_file():
            faults.append(f"{name} is missing")
        elif f"{_MARK}{current}" not in file.read_text(encoding="utf-8").splitlines():
            faults.append(f"{name} does not match the dependencies in pyproject.toml")
    return faults


# ------------------------------------------------------------------------------------------------------------- making


def make(folder: Path, *, upgrade: bool) -> None:
    """Resolve and write every file. Keeps versions that still fit; with `upgrade` uses those of this environment. One
    resolution covers all variants of one CUDA, so that any EXTRAS can be installed together."""
    pyproject, ours = project(), ROOT / "pyproject.toml"
    folder.mkdir(parents=True, exist_ok=True)
    current = digest(pyproject)
    written: dict[str, tuple[str, Mapping[str, Pin]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for cuda, torch in TORCH.items():
            base = f"cuda{cuda}.txt"
            files = [base, *(f"cuda{cuda}-{extra}.txt" for extra in EXTRAS)]
            constraint, everything = Path(scratch) / f"torch{cuda}.in", Path(scratch) / f"all{cuda}.txt"
            constraint.write_text("\n".join(torch))
            resolve(ours, everything, _kept(folder, files, upgrade), [*BASE, *EXTRAS], constraint)
            one = Path(scratch) / "one.txt"
            first = resolve(ours, one, [], BASE, everything)
            written[base] = f"the service with {torch[0]}", first
            for extra, name in zip(EXTRAS, files[1:], strict=True):
                pinned = resolve(ours, one, [], [*BASE, extra], everything)
                added = {package: pin for package, pin in pinned.items() if package not in first}
                written[name] = f"what the extra {extra} adds to {base}", added
        source = Path(scratch) / "build.in"
        source.write_text("\n".join(pyproject["build-system"]["requires"]))
        kept = _kept(folder, [BUILD], upgrade)
        written[BUILD] = "builds our own wheel", resolve(source, Path(scratch) / BUILD, kept, [])
    for name, (what, packages) in written.items():
        header = [
            f"# {name}: {what}. CPython {PYTHON}, Linux on x86_64. Made by scripts/lock-requirements; do not edit.",
            f"{_MARK}{current}",
        ]
        lines = [line for _, pin in sorted(packages.items()) for line in pin.lines]
        (folder / name).write_text("\n".join((*header, *lines, "")), encoding="utf-8")


def _kept(folder: Path, files: Iterable[str], upgrade: bool) -> list[str]:
    """Return the versions that uv keeps if they fit: the current pins, or the packages that the tests ran with."""
    present = [folder / name for name in files if (folder / name).is_file()]
    if upgrade or not present:
        installed = {
            each.metadata["Name"]: each.version.partition("+")[0] for each in importlib.metadata.distributions()
        }
        return [f"{name}=={version}" for name, version in sorted(installed.items())]
    return [line for file in present for pin in pins(file.read_text()).values() for line in pin.lines]


def resolve(
    source: Path, target: Path, kept: Sequence[str], extras: Sequence[str], constraint: Path | None = None
) -> dict[str, Pin]:
    """Return what uv resolves `source` to. It reads only the metadata of wheels. Raises CalledProcessError if the
    requirements contradict each other."""
    target.write_text("\n".join(kept))
    command = [sys.executable, "-m", "uv", "pip", "compile", str(source), "--output-file", str(target), "--quiet"]
    # Only PyPI: no other index, no local folder, no configuration file.
    command += ["--no-config", "--default-index", "https://pypi.org/simple", "--no-emit-index-url"]
    command += ["--python-version", PYTHON, "--python-platform", PLATFORM, "--only-binary", ":all:"]
    newest = (datetime.now(UTC) - COOLING).strftime("%Y-%m-%dT00:00:00Z")
    command += ["--exclude-newer", newest]
    command += ["--generate-hashes", "--no-header", "--no-annotate"]
    for extra in extras:
        command += ["--extra", extra]
    if constraint is not None:
        command += ["--constraint", str(constraint)]
    subprocess.run(command, check=True, cwd=target.parent)
    return pins(target.read_text(encoding="utf-8"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/lock-requirements", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="only check that the files match pyproject.toml; no network"
    )
    parser.add_argument("--upgrade", action="store_true", help="take the versions installed in .venv")
    options = parser.parse_args(arguments)
    if options.check:
        faults = stale()
        for fault in faults:
            sys.stderr.write(f"deployment/requirements: {fault}: run scripts/lock-requirements\n")
        return 1 if faults else 0
    try:
        make(FOLDER, upgrade=options.upgrade)
    except subprocess.CalledProcessError:
        sys.stderr.write("nothing was written: uv found no solution; see its message above\n")
        return 1
    sys.stdout.write(f"written: {', '.join(names())}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

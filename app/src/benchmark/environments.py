"""Which other engines there are, and the virtual environments they live in: one each, because their pins contradict
each other's and ours. Makes and finds environments; starts nothing in them but pip.
"""

from __future__ import annotations

import difflib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from connector.errors import ConfigurationError

Kind = Literal["embed", "search"]
WORKERS = Path(__file__).with_name("workers")
DEFAULT_FOLDER = Path(".owl-sap", "peers")
_COMPLETE = "owl-sap-peer"
"""Holds the recipe that the environment was made by; absent while it is being made."""
_TORCH = "torch=={torch}"


class PeerUnavailable(ConfigurationError):
    """No such peer, no environment for it, or it does not do what it was asked."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What pip installs. `alone`: afterwards, without their dependencies, whose pins would undo the first. `without`:
    taken out again, because it came along and breaks what is needed. `here`: the module by which our own environment
    can stand in, where it holds the peer anyway."""

    packages: Sequence[str]
    alone: Sequence[str] = ()
    without: Sequence[str] = ()
    here: str | None = None

    def steps(self) -> list[list[str]]:
        """Arguments of pip."""
        found = [["install", *(package.format(torch=_torch()) for package in self.packages)]]
        found += [["install", "--no-deps", *self.alone]] if self.alone else []
        found += [["uninstall", "--yes", *self.without]] if self.without else []
        return found


RECIPES: Mapping[str, Recipe] = {
    "sentence-transformers": Recipe(
        (_TORCH, "sentence-transformers>=6,<7", "transformers>=5,<6"), here="sentence_transformers"
    ),
    "infinity": Recipe(
        (
            *(_TORCH, "sentence-transformers>=6,<7", "transformers>=5,<6", "numpy", "huggingface-hub<2"),
            *("rich", "typer", "requests", "posthog", "distro", "backoff", "prometheus-fastapi-instrumentator"),
            *("orjson", "fastapi", "uvicorn", "pydantic"),
        ),
        alone=("infinity-emb==0.0.78",),
    ),
    "onnx": Recipe((_TORCH, "transformers>=5,<6", "tokenizers", "onnx", "onnxruntime", "sympy", "numpy")),
    # torchvision's ordinary wheel wants a torch built for CUDA; nothing here looks at pictures.
    "openvino": Recipe(
        (_TORCH, "sentence-transformers>=5", "optimum-intel[openvino]", "numpy"), without=("torchvision",)
    ),
    "numpy": Recipe(("numpy",), here="numpy"),
    "sqlite-vec": Recipe(("sqlite-vec", "apsw", "numpy")),
    "usearch": Recipe(("usearch", "numpy")),
    "lancedb": Recipe(("lancedb", "pyarrow", "numpy")),
    "faiss": Recipe(("faiss-cpu", "numpy")),
}


@dataclass(frozen=True, slots=True)
class Peer:
    """`environment`: one of RECIPES; None: our own. `how`: what the worker is told of the variant."""

    name: str
    kind: Kind
    worker: Path
    environment: str | None
    how: Mapping[str, Any] = field(default_factory=dict)


def _known(name: str, kind: Kind, environment: str | None = None, **how: Any) -> Peer:
    environment = environment or name
    worker = WORKERS / f"{kind}_with_{environment.replace('-', '_')}.py"
    return Peer(name, kind, worker, environment, how)


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        _known("sentence-transformers", "embed"),
        _known("infinity", "embed"),
        _known("onnx", "embed"),
        _known("onnx-int8", "embed", "onnx", int8=True),
        _known("openvino", "embed"),
        _known("numpy", "search"),
        _known("sqlite-vec", "search"),
        _known("usearch", "search"),
        _known("lancedb", "search"),
        _known("faiss", "search"),
    )
}


def peer(name: str, kind: Kind) -> Peer:
    """By its name, or a file ending in .py: a worker of the user's own, run by the Python that runs us. Raises
    PeerUnavailable."""
    if name.endswith(".py"):
        worker = Path(name)
        if not worker.is_file():
            raise PeerUnavailable(f"--against {name}: there is no such file")
        return Peer(worker.stem, kind, worker.resolve(), None)
    names = [each.name for each in PEERS.values() if each.kind == kind]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = (
            f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(names)}, or a worker's file ending in .py"
        )
        raise PeerUnavailable(f'--against {name}: no peer of "benchmark {kind}" is called that; {hint}')
    return PEERS[name]


def python_of(peer: Peer, folder: Path) -> Path:
    """The Python that runs the peer's worker. Raises PeerUnavailable, naming the command that makes its environment."""
    if peer.environment is None:
        return Path(sys.executable)
    if is_made(peer.environment, folder):
        return _python(peer.environment, folder)
    here = RECIPES[peer.environment].here
    if here is not None and importlib.util.find_spec(here) is not None:
        return Path(sys.executable)
    where = "" if folder == DEFAULT_FOLDER else f" --peers {folder}"
    raise PeerUnavailable(
        f"{peer.name} has no environment in {folder}; make it: owl-sap benchmark peers {peer.environment} --make{where}"
    )


def chosen(names: Sequence[str]) -> list[str]:
    """The environments of peers or environments by these names, all without any. Raises PeerUnavailable."""
    found: dict[str, None] = {}
    for name in names or RECIPES:
        environment = (PEERS[name].environment or name) if name in PEERS else name
        if environment not in RECIPES:
            raise PeerUnavailable(f"no peer is called {name}; there are: {', '.join(PEERS)}")
        found[environment] = None
    return list(found)


def packages(environment: str) -> list[str]:
    """What pip is told to install, without versions of ours."""
    recipe = RECIPES[environment]
    return [package.format(torch="ours") for package in (*recipe.packages, *recipe.alone)]


def is_made(environment: str, folder: Path) -> bool:
    """By the recipe of today."""
    try:
        found = (folder / environment / _COMPLETE).read_text(encoding="utf-8")
    except OSError:
        return False
    return found == _written(environment)


def make(environment: str, folder: Path, say: Callable[[str], None]) -> None:
    """Make or renew an environment: minutes, from the package index. Raises PeerUnavailable with pip's words, and for a
    folder of that name that is something else."""
    place = folder / environment
    if place.exists() and not (place / "pyvenv.cfg").is_file():
        raise PeerUnavailable(f"{place} is there and is no virtual environment: name another folder with --peers")
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    say(f"making {place}")
    _run([sys.executable, "-m", "venv", str(place)], environment)
    for step in RECIPES[environment].steps():
        say(f"pip {' '.join(step)}")
        pip = [str(_python(environment, folder)), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        _run([*pip, *step], environment)
    (place / _COMPLETE).write_text(_written(environment), encoding="utf-8")


def _run(command: Sequence[str], environment: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()[-8:]
        raise PeerUnavailable("\n".join([f"the environment of {environment} could not be made:", *words]))


def _python(environment: str, folder: Path) -> Path:
    return folder.absolute() / environment / "bin" / "python"


def _written(environment: str) -> str:
    return "\n".join(" ".join(step) for step in RECIPES[environment].steps()) + "\n"


def _torch() -> str:
    """Both sides compute with the same torch: ours, exactly, build and all."""
    try:
        return version("torch")
    except PackageNotFoundError:
        raise PeerUnavailable(
            "torch is not installed here, and the peer must have the same: install the extra engine"
        ) from None

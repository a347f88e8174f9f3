"""Other engines to compare with: virtual environments, one each because their pins contradict each other's and ours,
and workers that run in them.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from app.src.benchmark.harness import Report, Work, WorkFailed
from connector.errors import ConfigurationError

Kind = Literal["embed", "search"]
WORKERS = Path(__file__).with_name("workers")
DEFAULT_FOLDER = Path(".owl-sap", "peers")
_COMPLETE = "owl-sap-peer"  # contains the recipe; absent while the environment is being made
_TORCH = "torch=={torch}"


class PeerUnavailable(ConfigurationError):
    """The peer is unknown, has no environment, or fails."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What pip installs. `alone`: installed afterwards without dependencies, whose pins would undo the first.
    `without`: uninstalled again. `here`: the module that shows that our own environment contains the peer."""

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
    """`environment`: one of RECIPES; None: our own. `how`: options of the variant for the worker."""

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
    """Return a peer by its name, or for a file ending in .py the user's own worker, run by this Python. Raises
    PeerUnavailable."""
    if name.endswith(".py"):
        worker = Path(name)
        if not worker.is_file():
            raise PeerUnavailable(f"--against {name}: file not found")
        return Peer(worker.stem, kind, worker.resolve(), None)
    names = [each.name for each in PEERS.values() if each.kind == kind]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"use {', '.join(names)}, or a worker's file ending in .py"
        raise PeerUnavailable(f'--against {name}: unknown peer of "benchmark {kind}"; {hint}')
    return PEERS[name]


def python_of(peer: Peer, folder: Path) -> Path:
    """Return the Python that runs the peer's worker. Raises PeerUnavailable with the command that makes it."""
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
    """Return the environments of these peers or environments, all for no names. Raises PeerUnavailable."""
    found: dict[str, None] = {}
    for name in names or RECIPES:
        environment = (PEERS[name].environment or name) if name in PEERS else name
        if environment not in RECIPES:
            raise PeerUnavailable(f"unknown peer {name}; use {', '.join(PEERS)}")
        found[environment] = None
    return list(found)


def packages(environment: str) -> list[str]:
    """Return what pip installs, without the version of our torch."""
    recipe = RECIPES[environment]
    return [package.format(torch="ours") for package in (*recipe.packages, *recipe.alone)]


def is_made(environment: str, folder: Path) -> bool:
    """Return whether the environment was made by the current recipe."""
    try:
        found = (folder / environment / _COMPLETE).read_text(encoding="utf-8")
    except OSError:
        return False
    return found == _written(environment)


def make(environment: str, folder: Path, say: Callable[[str], None]) -> None:
    """Make or renew an environment from the package index, which takes minutes. Raises PeerUnavailable with pip's
    message, and for a folder of that name that is not a virtual environment."""
    place = folder / environment
    if place.exists() and not (place / "pyvenv.cfg").is_file():
        raise PeerUnavailable(f"{place} exists and is not a virtual environment: name another folder with --peers")
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
    """Return the version of our torch; both sides compute with the same build."""
    try:
        return version("torch")
    except PackageNotFoundError:
        raise PeerUnavailable(
            "torch is not installed here, and the peer needs the same version: install the extra engine"
        ) from None


_RUN = "import runpy, sys; sys.path.insert(0, sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
_START_SECONDS = 120.0
_ANSWER_SECONDS = 900.0
_STOP_SECONDS = 10.0


def available(names: Sequence[str], kind: Kind, report: Report) -> list[str]:
    """Return the peers that can run; the others are named in the report's notes."""
    found = []
    for name in names:
        try:
            python_of(peer(name, kind), DEFAULT_FOLDER)
            found.append(name)
        except PeerUnavailable as error:
            report.notes.append(f"left out: {error}")
    return found


@contextlib.contextmanager
def left_out(report: Report, processes: dict[str, PeerProcess], name: str) -> Iterator[None]:
    """Drop a failing peer from `processes` with a note. Raises PeerUnavailable when none remains and there are no
    figures."""
    try:
        yield
    except PeerUnavailable as error:
        del processes[name]
        if not processes and not report.figures:
            raise
        report.notes.append(f"left out: {error}")


def in_rounds(work: Work) -> Work:
    """Let a peer's work fail without ending the rounds of the others."""

    def run() -> float:
        try:
            return work()
        except PeerUnavailable as error:
            raise WorkFailed(str(error)) from error

    return run


class PeerProcess:
    """A peer's worker as a child process in its own environment, asked one thing at a time, so that only one side
    computes; the worker takes the times. A context. `versions`: of its packages and its Python. Raises PeerUnavailable
    with the worker's last words."""

    def __init__(self, peer: Peer, folder: Path) -> None:
        self.peer = peer
        self._python = python_of(peer, folder)
        self.cache = (folder / "cache" / (peer.environment or peer.name)).absolute()

    def __enter__(self) -> PeerProcess:
        self._log = tempfile.TemporaryFile()
        # -E -s -P: the worker can import the shared worker modules, and nothing else of ours.
        self._process = subprocess.Popen(
            [str(self._python), "-E", "-s", "-P", "-c", _RUN, str(WORKERS), str(self.peer.worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
        )
        # Python's buffered pipe has no timeout; a thread reads it into a queue, which has one.
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"owl-sap-peer-{self.peer.name}", daemon=True)
        self._reader.start()
        try:
            greeting = self._answer(_START_SECONDS)
        except BaseException:
            self._process.kill()
            self.__exit__(None, None, None)
            raise
        self.versions: dict[str, str] = greeting.get("versions", {}) | {"python": greeting.get("python", "unknown")}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_STOP_SECONDS if error is None else 0.5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._reader.join()
        process.stdout.close()
        self._log.close()

    def ask(self, action: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": action, **arguments}, default=str) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._broken("it ended") from None
        return self._answer(_ANSWER_SECONDS)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise self._broken(f"no answer within {seconds:.0f} s") from None
        if not line:
            self._lines.put("")  # for the next call
            raise self._broken("it ended")
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self._broken("its answer is not JSON") from None
        if "error" in found:
            raise PeerUnavailable(f"{self.peer.name}: {found['error']}")
        return found

    def _broken(self, what: str) -> PeerUnavailable:
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        return PeerUnavailable(f"{self.peer.name}: {what}{': ' + words[-1] if words else ''}")

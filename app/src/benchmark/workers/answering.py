"""The protocol between a worker and the measuring process: one JSON object per line, each answered by one. Workers run
in another environment, so these files import nothing of ours.
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
from typing import Any

Action = Callable[..., dict[str, Any] | None]


def answer(packages: Sequence[str], **actions: Action) -> None:
    """Say what versions are here, then do what is asked until stdin ends: {"do": ACTION} gets {...} or {"error"}."""
    # Libraries print to stdout; that goes to stderr, and only answers go where stdout went.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _say(answers, {"ready": True, "python": platform.python_version(), "versions": _versions(packages)})
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        try:
            found = actions[request.pop("do")](**request) or {}
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        _say(answers, found)


def _say(answers: Any, document: dict[str, Any]) -> None:
    answers.write(json.dumps(document) + "\n")
    answers.flush()


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What `work` gives, and its seconds by the clock on the wall and of CPU time of all threads."""
    start, busy = time.perf_counter(), time.process_time()
    found = work()
    return found, {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}


def read_json(file: str) -> Any:
    return json.loads(Path(file).read_text(encoding="utf-8"))

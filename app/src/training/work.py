"""A training that is not finished: its folder beside the one to come, what it was begun with, and that nobody else
works in it. The finished folder appears in one step, whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from connector.errors import ConfigurationError

_BEGUN = "begun.json"
_UNFINISHED = ".unfinished"
_LOCK = "lock"


class Work:
    """`out`: the folder to come. `folder`: where the work is kept until then."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.with_name(out.name + _UNFINISHED)
        self.checkpoints = self.folder / "checkpoints"
        self.candidate = self.folder / "model.new"

    @property
    def begun(self) -> bool:
        return (self.folder / _BEGUN).exists()

    @contextmanager
    def opened(self, *, resume: bool) -> Iterator[None]:
        """Ours alone until the block is left. Raises ConfigurationError when it cannot be begun, or gone on with."""
        self._check(resume)
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(f"{self.folder} cannot be written: {error.strerror}") from None
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigurationError(f"another process is training in {self.folder}") from None
            try:
                yield
            finally:
                self._forget_unless_begun()
        finally:
            os.close(lock)

    def _forget_unless_begun(self) -> None:
        """What was refused leaves no folder that looks like a training to go on with; what others put there stays."""
        if self.begun:
            return
        with suppress(OSError):
            (self.folder / _LOCK).unlink()
            self.checkpoints.rmdir()
            self.folder.rmdir()

    def _check(self, resume: bool) -> None:
        if self.out.exists():
            raise ConfigurationError(f"{self.out} is there already: give another folder, --out FOLDER")
        if resume and not self.begun:
            raise ConfigurationError(f"there is nothing to go on with: {self.folder} was never begun")
        if not resume and self.begun:
            raise ConfigurationError(
                f"{self.folder} holds a training that is not finished: --resume goes on with it, or delete the folder"
            )

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Remember what it was begun with."""
        target = self.folder / _BEGUN
        written = target.with_suffix(".new")
        written.write_text(json.dumps(facts, indent=2), encoding="utf-8")
        written.replace(target)

    def facts(self) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / _BEGUN).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{self.folder / _BEGUN} cannot be read ({type(error).__name__})") from None
        if not isinstance(found, dict):
            raise ConfigurationError(f"{self.folder / _BEGUN} holds no JSON object")
        return found

    def clear_candidate(self) -> None:
        """One that a kill left behind half written."""
        shutil.rmtree(self.candidate, ignore_errors=True)

    def finish(self) -> None:
        """The candidate becomes `out` in one step, on the disk before it does; what is left of the work is deleted."""
        for path in sorted(self.candidate.rglob("*")):
            _synced(path)
        _synced(self.candidate)
        self.candidate.rename(self.out)
        _synced(self.out.parent)
        shutil.rmtree(self.folder)


def next_folder(models: Path, name: str) -> Path:
    """`NAME-1` in `models`, or the first number behind those that are there; an unfinished one is not there yet."""
    taken = [path.name.removeprefix(f"{name}-") for path in models.glob(f"{name}-*")]
    numbers = [int(number) for number in taken if number.isdecimal()]
    return models / f"{name}-{max(numbers, default=0) + 1}"


def _synced(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

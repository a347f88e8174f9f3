"""The folder of an unfinished training: its options, checkpoints and lock. The finished model appears beside it in one
step."""

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
    """`out`: the folder of the finished model. `folder`: of the unfinished training."""

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
        """Hold the folder's lock. Raises ConfigurationError when the training cannot be begun or resumed."""
        if self.out.exists():
            raise ConfigurationError(f"{self.out} already exists; name another folder with --out")
        if resume and not self.begun:
            raise ConfigurationError(f"nothing to resume: no training was begun in {self.folder}")
        if not resume and self.begun:
            raise ConfigurationError(
                f"{self.folder} contains an unfinished training: continue it with --resume, or delete the folder"
            )
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
                if not self.begun:  # leave no empty training folder; other files stay
                    with suppress(OSError):
                        (self.folder / _LOCK).unlink()
                        self.checkpoints.rmdir()
                        self.folder.rmdir()
        finally:
            os.close(lock)

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Store the options of the training."""
        target = self.folder / _BEGUN
        written = target.with_suffix(".new")
        written.write_text(json.dumps(facts, indent=2), encoding="utf-8")
        written.replace(target)

    def facts(self) -> dict[str, Any]:
        """Return what `begin` stored. Raises ConfigurationError."""
        try:
            found = json.loads((self.folder / _BEGUN).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{self.folder / _BEGUN} cannot be read ({type(error).__name__})") from None
        if not isinstance(found, dict):
            raise ConfigurationError(f"{self.folder / _BEGUN} must contain a JSON object")
        return found

    def finish(self) -> None:
        """Rename the candidate to `out` once it is on disk, and delete the rest."""
        for path in (*sorted(self.candidate.rglob("*")), self.candidate):
            _sync_to_disk(path)
        self.candidate.rename(self.out)
        _sync_to_disk(self.out.parent)
        shutil.rmtree(self.folder)


def next_folder(models: Path, name: str) -> Path:
    """Return `NAME-1` in `models`, or the first free number after the finished ones."""
    taken = [path.name.removeprefix(f"{name}-") for path in models.glob(f"{name}-*")]
    numbers = [int(number) for number in taken if number.isdecimal()]
    return models / f"{name}-{max(numbers, default=0) + 1}"


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Input and output of `owl-sap embed`: lines in, vectors out, in batches so that a long file needs little memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np
import orjson
from numpy.typing import NDArray

from app.src.cli import output
from app.src.cli.exits import UsageFault

_BATCH = 4096


def lines_of(file: Path | None) -> Iterator[list[str]]:
    """The lines without their ends, a batch at a time. Raises UsageFault for a file that is no text."""
    try:
        # Opened anew: Python's own stdin lets bytes that are no text through in some locales. -sig: a mark of Windows
        # editors at the start is no part of the first line.
        source = 0 if file is None else file
        with open(source, encoding="utf-8-sig", errors="strict", closefd=file is not None) as opened:
            yield from _batches(opened)
    except OSError as error:
        raise UsageFault(f"{file or 'stdin'}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageFault(f"{file or 'stdin'}: not UTF-8 text") from None


def _batches(stream: IO[str]) -> Iterator[list[str]]:
    while batch := [line.rstrip("\r\n") for line in islice(stream, _BATCH)]:
        yield batch


def check_target(out: Path | None) -> None:
    """Before anything is computed. Raises UsageFault for a file that cannot be written."""
    if out is None:
        return
    if out.suffix != ".npy":
        raise UsageFault(f"--out {out}: only .npy files are written")
    if not out.parent.is_dir():
        raise UsageFault(f"--out {out}: there is no folder {out.parent}")
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise UsageFault(f"--out {out}: cannot be written")


class Sink:
    """Where vectors go: JSON lines at once, or collected for one JSON document or an .npy file. With both, the
    document says what the file holds."""

    def __init__(self, file: Path | None, json: bool) -> None:
        self._file = file
        self._json = json
        self._whole = json or file is not None
        self._blocks: list[NDArray[np.float32]] = []
        self._count = 0
        self._cut = 0

    def add(self, vectors: NDArray[np.float32], limit: int, tokens: Sequence[int]) -> None:
        self._count += len(vectors)
        self._cut += sum(count > limit for count in tokens)
        if self._whole:
            self._blocks.append(vectors)
            return
        for vector in vectors:
            sys.stdout.buffer.write(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))

    def close(self, dimension: int) -> None:
        sys.stdout.buffer.flush()
        vectors = np.concatenate([np.empty((0, dimension), dtype=np.float32), *self._blocks])
        if self._file is not None:
            np.save(self._file, vectors)
            output.say(f"{self._count} vectors of {dimension} numbers in {self._file}")
            if self._json:
                output.write_json({"file": str(self._file), "vectors": self._count, "dimension": dimension})
        elif self._json:
            output.write_json(vectors)
        if self._cut:
            output.say(f"{self._cut} texts are longer than the model takes and were cut")

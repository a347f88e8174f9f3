"""Input and output of `owl-sap embed`: lines in, vectors out, in batches so that a long file needs little memory."""

from __future__ import annotations

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
        if file is None:
            yield from _batches(sys.stdin)
        else:
            with file.open(encoding="utf-8") as opened:
                yield from _batches(opened)
    except OSError as error:
        raise UsageFault(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageFault(f"{file or 'stdin'}: not UTF-8 text") from None


def _batches(stream: IO[str]) -> Iterator[list[str]]:
    while batch := [line.rstrip("\r\n") for line in islice(stream, _BATCH)]:
        yield batch


class Sink:
    """Where vectors go: JSON lines at once, or collected for one JSON document or an .npy file."""

    def __init__(self, file: Path | None, whole: bool) -> None:
        self._file = file
        self._whole = whole or file is not None
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
        elif self._whole:
            output.write_json(vectors)
        if self._cut:
            output.say(f"{self._cut} texts are longer than the model takes and were cut")

"""The memory of a sync does not grow with the table, the index of what is stored aside. Peaks of child processes."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from connector.model import CollectionSpec, KeyRange, Query, Row
from connector.stores.local.store import LocalStore
from connector.sync.run import Ends, SyncOptions, sync
from tests.connector.conftest import MATERIALS, MemorySource

GROWTH_MB = 100


class EndlessSource(MemorySource):
    """Rows made when their page is read."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.count_of_rows = rows

    def count(self, query: Query) -> int:
        return self.count_of_rows

    def pages(self, query: Query, size: int, within: KeyRange | None = None) -> Iterator[list[Row]]:
        for start in range(0, self.count_of_rows, size):
            numbers = range(start, min(start + size, self.count_of_rows))
            yield [self._row(number) for number in numbers]

    def _row(self, number: int) -> Row:
        text = f"pump {number} of plant {number % 7}, checked by maintenance " * 4
        key = ("100", f"{number:018d}")
        return Row(key, {"MANDT": "100", "MATNR": key[1], "MAKTX": text, "MTART": "FERT"})


def main(rows: int) -> None:
    """Prints the peak in MB after a first sync and after one that finds nothing to do."""
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        embedder = EngineEmbedder(load_engine(EngineOptions(model="hash:64")))
        spec = CollectionSpec("materials", MATERIALS, "{MAKTX}", metadata=("MTART",))
        peaks: list[int] = []
        for wanted in ((rows, 0), (0, rows)):
            report = sync(spec, Ends(EndlessSource(rows), store, embedder), SyncOptions(readers=1))
            assert (report.upserted, report.unchanged) == wanted
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
        store.close()
    print(*peaks)


def peaks(rows: int) -> list[int]:
    command = [sys.executable, "-c", f"from tests.connector.test_memory_of_sync import main; main({rows})"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    return [int(peak) for peak in done.stdout.split()]


@pytest.mark.slow
def test_ten_times_the_rows_take_no_more_memory() -> None:
    small, large = peaks(20_000), peaks(200_000)
    growth = [more - less for less, more in zip(small, large, strict=True)]
    assert max(growth) < GROWTH_MB, f"{small} MB at 20,000 rows, {large} MB at 200,000"

"""Texts from all over a table: which are taken, and that they are those of a sync."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from connector.model import ChunkSpec, CollectionSpec, KeyRange, Query, Row
from connector.sync.sampling import FARTHEST, PARTS, SPARE, sample_texts
from tests.connector.conftest import MATERIALS, MemorySource, WordEmbedder

SPEC = CollectionSpec("materials", MATERIALS, "{MAKTX}")


class LargeSource(MemorySource):
    """Has ranges, as HANA's source has, and counts the rows that were asked for."""

    def __init__(self, rows: int) -> None:
        super().__init__(key=("MATNR",))
        self.rows_read = 0
        for number in range(rows):
            self.put(f"{number:06}", MAKTX=f"pump {number}")

    def ranges(self, query: Query, parts: int, rows: int) -> list[KeyRange]:
        keys = sorted(self.data)
        borders = keys[max(1, rows // parts) - 1 :: max(1, rows // parts)][: parts - 1]
        return [KeyRange(after, upto) for after, upto in pairwise([None, *borders, None])]

    def pages(self, query: Query, size: int, within: KeyRange | None = None) -> Iterator[list[Row]]:
        after = None if within is None else within.after
        upto = None if within is None else within.upto
        keys = [key for key in sorted(self.data) if (after is None or key > after) and (upto is None or key <= upto)]
        for start in range(0, len(keys), size):
            page = self.rows(query, keys[start : start + size])
            self.rows_read += len(page)
            yield page


def _sample(source: Any, count: int, spec: CollectionSpec = SPEC) -> list[str]:
    return sample_texts(spec, source, WordEmbedder(), count)


def test_a_large_table_is_looked_at_everywhere_and_read_in_small_part() -> None:
    source = LargeSource(20_000)
    texts = _sample(source, 200)
    assert len(set(texts)) == 200
    numbers = sorted(int(text.split()[1]) for text in texts)
    parts = {number * PARTS // 20_000 for number in numbers}
    assert parts == set(range(PARTS))
    assert source.rows_read <= SPARE * 200 + PARTS
    assert _sample(source, 200) == texts


@pytest.mark.parametrize(("rows", "wanted", "got"), [(50, 100, 50), (150, 100, 100), (0, 100, 0), (50, 0, 0)])
def test_a_small_table_is_read_whole(rows: int, wanted: int, got: int) -> None:
    texts = _sample(LargeSource(rows), wanted)
    assert len(set(texts)) == len(texts) == got
    assert texts == sorted(texts, key=lambda text: int(text.split()[1]))


def test_blank_and_equal_texts_count_once_or_not_at_all() -> None:
    source = LargeSource(400)
    for number, key in enumerate(sorted(source.data)):
        source.data[key] = {"MAKTX": ("", "same", f"pump {number}")[number % 3]}
    texts = _sample(source, 100)
    assert "" not in texts
    assert len(set(texts)) == len(texts) > 50


def test_long_texts_come_in_the_pieces_that_are_embedded() -> None:
    source = LargeSource(40)
    source.put("000000", MAKTX=" ".join(f"w{number}" for number in range(20)))
    spec = CollectionSpec("materials", MATERIALS, "{MAKTX}", chunk=ChunkSpec(8, 0))
    texts = _sample(source, 100, spec)
    assert max(len(text.split()) for text in texts) == 8
    assert "w0 w1 w2 w3 w4 w5 w6 w7" in texts


def test_rows_that_cannot_be_rendered_are_passed_over() -> None:
    source = LargeSource(40)
    source.put("9" * 2500, MAKTX="a key too long for an id")
    assert len(_sample(source, 100)) == 40


def test_a_table_of_one_text_is_not_read_to_its_end() -> None:
    source = LargeSource(20_000)
    for key in source.data:
        source.data[key] = {"MAKTX": "same"}
    assert _sample(source, 200) == ["same"]
    assert source.rows_read <= FARTHEST * 200 + FARTHEST // SPARE * PARTS


def test_where_most_rows_are_blank_more_are_read() -> None:
    source = LargeSource(20_000)
    for number, key in enumerate(source.data):
        if number % 10:
            source.data[key] = {"MAKTX": ""}
    texts = _sample(source, 200)
    assert len(set(texts)) == 200
    assert {int(text.split()[1]) * PARTS // 20_000 for text in texts} == set(range(PARTS))

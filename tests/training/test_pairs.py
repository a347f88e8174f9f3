"""Pairs out of a file and out of rows: what counts, what is left out and counted, what is refused without its text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import pytest

from app.src.training.pairs import Pair, Pairs, read_file, read_rows
from connector.errors import ConfigurationError, NoKey, UnknownColumn
from connector.model import CollectionSpec, Column, Query, Row, Table, TableRef
from connector.protocols import Source


def lines(tmp_path: Path, *content: str | dict[str, Any]) -> Path:
    file = tmp_path / "pairs.jsonl"
    texts = (line if isinstance(line, str) else json.dumps(line) for line in content)
    file.write_text("\n".join(texts), encoding="utf-8")
    return file


def test_both_pairs_of_names_and_nothing_else_of_a_line(tmp_path: Path) -> None:
    file = lines(
        tmp_path,
        "\ufeff" + json.dumps({"query": " oil leak ", "text": "A seal\nis worn", "rating": 3}),
        "",
        {"anchor": "noise", "positive": "bearing \u0000worn", "query": 7},
    )
    found = read_file(file, 100)
    assert found.pairs == [Pair("oil leak", "A seal\nis worn"), Pair("noise", "bearing  worn")]
    assert (found.read, found.limited) == (2, False)


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    pair = {"query": "a", "text": "b"}
    file = lines(
        tmp_path, pair, pair, {"query": " ", "text": "b"}, {"query": "c", "text": "c"}, {"query": "ab", "text": ""}
    )
    counts = read_file(file, 100).counts()
    assert counts == {
        "origin": "file",
        "pairs": 1,
        "read": 5,
        "incomplete": 2,
        "duplicates": 1,
        "same": 1,
        "unreadable": 0,
        "limited": False,
    }


def test_pairs_whose_texts_are_cut_elsewhere_are_two(tmp_path: Path) -> None:
    file = lines(tmp_path, {"query": "a b", "text": "c"}, {"query": "a", "text": "b c"}, {"query": "a b", "text": " c"})
    found = read_file(file, 100)
    assert (len(found.pairs), found.skipped["duplicates"]) == (2, 1)


def test_a_limit_ends_the_reading_and_is_told(tmp_path: Path) -> None:
    file = lines(tmp_path, *({"query": f"q{n}", "text": f"t{n}"} for n in range(5)), "no json")
    found = read_file(file, 3)
    assert (len(found.pairs), found.limited) == (3, True)
    with pytest.raises(ConfigurationError, match="line 6"):
        read_file(file, 100)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("canary", "is not valid JSON"),
        ('{"query": "canary", "text": }', "is not valid JSON"),
        ('["canary"]', "must be a JSON object"),
        ('{"query": "canary"}', 'needs "query" and "text", or'),
        ('{"query": "canary", "positive": "x"}', 'needs "query" and "text", or'),
        ('{"query": "canary", "text": null}', 'must have a text as "text"'),
        ('{"anchor": ["canary"], "positive": "x"}', 'must have a text as "anchor"'),
    ],
)
def test_a_bad_line_is_named_by_its_number_and_its_text_is_not_told(tmp_path: Path, line: str, words: str) -> None:
    good = {"query": "a", "text": "b"}
    with pytest.raises(ConfigurationError) as caught:
        read_file(lines(tmp_path, good, "", line), 100)
    assert f"line 3 {words}" in str(caught.value)
    assert "canary" not in str(caught.value)


def test_many_bad_lines_are_counted_and_five_of_them_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_file(lines(tmp_path, *["{"] * 12), 100)
    told = str(caught.value).splitlines()
    assert [f"line {number} is" in line for number, line in enumerate(told[:5], 1)] == [True] * 5
    assert told[5:] == ["and 7 more lines"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for file in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ConfigurationError, match="cannot be read"):
            read_file(file, 100)
    (tmp_path / "latin").write_bytes(b'{"query": "\xe4", "text": "b"}')
    with pytest.raises(ConfigurationError, match="line 1 is not valid JSON"):
        read_file(tmp_path / "latin", 100)


def test_the_digest_tells_pairs_apart_and_their_order() -> None:
    digests = set()
    for pairs in (
        [("a", "b"), ("c", "d")],
        [("c", "d"), ("a", "b")],
        [("ab", "c"), ("c", "d")],
        [("a", "bc"), ("c", "d")],
    ):
        digests.add(Pairs("file", [Pair(*pair) for pair in pairs]).digest)
    assert len(digests) == 4


# ------------------------------------------------------------------------------------------------------------- of rows

TABLE = Table(
    TableRef("S", "T"),
    (
        Column("K", "INTEGER"),
        Column("TITLE", "NVARCHAR", 40),
        Column("TEXT", "NCLOB"),
        Column("WEIGHT", "DECIMAL", 10, 2),
        Column("PICTURE", "BLOB"),
    ),
    ("K",),
)


class Rows:
    """A source of these rows that remembers what it was asked for."""

    def __init__(self, *rows: tuple[Any, ...], table: Table = TABLE) -> None:
        self.table = table
        self.given = rows
        self.query: Query | None = None
        self.pages_taken = 0

    def describe(self, ref: TableRef) -> Table:
        assert ref == self.table.ref
        return self.table

    def pages(self, query: Query, size: int) -> Iterator[list[Row]]:
        self.query = query
        for start in range(0, len(self.given), size):
            self.pages_taken += 1
            page = self.given[start : start + size]
            yield [Row((number,), dict(zip(query.columns, row, strict=True))) for number, row in enumerate(page, start)]


def read(source: Rows, columns: tuple[str, str] = ("TITLE", "TEXT"), **more: Any) -> Any:
    spec = CollectionSpec("c", source.table.ref, "{TITLE}", where="K > 0", **more.pop("spec", {}))
    return read_rows(spec, columns, cast(Source, source), more.pop("limit", 1000), **more)


def test_rows_become_pairs_and_those_without_both_texts_are_counted() -> None:
    source = Rows(("pump", "a long text"), (None, "x"), ("y", None), ("z", "  "), ("pump", "a long text"), ("w", "w"))
    found = read(source)
    assert found.pairs == [Pair("pump", "a long text")]
    counts = found.counts()
    assert (counts["origin"], counts["read"], counts["incomplete"]) == ("rows", 6, 3)
    assert (counts["duplicates"], counts["same"]) == (1, 1)
    assert source.query == Query(TABLE.ref, ("K",), ("TITLE", "TEXT"), "K > 0")


def test_values_are_formatted_as_in_texts_of_the_collection() -> None:
    found = read(Rows(("pump", Decimal("12.50"))), ("TITLE", "WEIGHT"))
    assert found.pairs == [Pair("pump", "12.5")]


def test_a_value_that_cannot_be_shown_is_counted() -> None:
    table = Table(TABLE.ref, (*TABLE.columns, Column("D", "DOUBLE")), ("K",))
    found = read(Rows(("pump", float("nan")), ("seal", 1.5), table=table), ("TITLE", "D"))
    assert (found.pairs, found.skipped["unreadable"], found.read) == ([Pair("seal", "1.5")], 1, 2)


def test_no_more_pages_are_read_than_are_needed() -> None:
    source = Rows(*((f"t{n}", f"text {n}") for n in range(100)))
    found = read(source, limit=15, page_rows=10)
    assert (len(found.pairs), found.limited, source.pages_taken) == (15, True, 2)


@pytest.mark.parametrize(
    ("columns", "error", "words"),
    [
        (("TITEL", "TEXT"), UnknownColumn, "TITLE"),
        (("TITLE", "PICTURE"), ConfigurationError, "'PICTURE' of S.T is a BLOB"),
        (("TITLE", "TITLE"), ConfigurationError, "'TITLE' twice"),
    ],
)
def test_columns_that_cannot_serve(columns: tuple[str, str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read(Rows(("a", "b")), columns)


def test_a_view_needs_a_key() -> None:
    view = Table(TABLE.ref, TABLE.columns, (), is_view=True)
    with pytest.raises(NoKey):
        read(Rows(("a", "b"), table=view))
    assert read(Rows(("a", "b"), table=view), spec={"key": ("K",)}).pairs == [Pair("a", "b")]

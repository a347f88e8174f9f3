"""Tables on screens of different widths."""

from __future__ import annotations

import pytest
from rich.console import Console

from app.src.cli import output

ROWS = [
    {"collection": name, "rows": number, "last_sync": "2026-11-21 03:22:58Z", "model": "all-MiniLM-L6-v2@ecbda11b"}
    for name, number in [("materials", 594), ("notifications", 1_544), ("customers", 0)]
]
COLUMNS = ("collection", "rows", "last_sync", "model")


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int) -> list[str]:
    monkeypatch.setattr(output, "console", lambda stderr=False: Console(width=width, stderr=stderr))
    output.counts("Collections", ROWS, COLUMNS)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines)
    return lines


def test_a_row_is_a_line_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = (line for line in printed(monkeypatch, capsys, 120) if "notifications" in line)
    assert all(text in line for text in ("1,544", "2026-11-21 03:22:58Z", "all-MiniLM-L6-v2@ecbda11b"))


@pytest.mark.parametrize(("width", "tables"), [(70, 2), (60, 3)])
def test_on_a_narrow_screen_columns_become_lines_and_no_value_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, tables: int
) -> None:
    lines = printed(monkeypatch, capsys, width)
    assert sum("last sync" in line for line in lines) == tables
    whole = "\n".join(lines)
    assert whole.count("2026-11-21 03:22:58Z") == whole.count("all-MiniLM-L6-v2@ecbda11b") == len(ROWS)


def test_nothing_is_said_to_be_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    output.counts("Collections", [], COLUMNS)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "Collections: nothing\n")


def test_values_are_never_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output.counts("[bold]", [{"collection": "[red]x", "rows": True}], ("collection", "rows"))
    assert "[red]x" in capsys.readouterr().out

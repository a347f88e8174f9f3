"""Tables on screens of different widths; tables on a terminal, JSON lines elsewhere, and the choice between them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from app.src.cli import output
from app.src.jobs.journal import JobOptions
from app.src.jobs.records import FileRecords
from app.src.jobs.runner import Jobs, Run
from connector.errors import RowRejected
from tests.forked import owl_sap
from tests.surface.conftest import Cli, environment

ROWS = [
    {"collection": name, "rows": number, "last_sync": "2026-11-21 03:22:58Z", "model": "all-MiniLM-L6-v2@ecbda11b"}
    for name, number in [("materials", 594), ("notifications", 1_544), ("customers", 0)]
]
COLUMNS = ("collection", "rows", "last_sync", "model")


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int) -> list[str]:
    monkeypatch.setattr(output, "console", lambda stderr=False: Console(width=width, stderr=stderr))
    monkeypatch.setattr(output.Invocation, "layout", "table")
    output.data(ROWS, "Collections", COLUMNS, json=False)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines)
    return lines


def test_a_row_is_a_line_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = (line for line in printed(monkeypatch, capsys, 120) if "notifications" in line)
    assert all(text in line for text in ("1,544", "2026-11-21 03:22:58Z", "all-MiniLM-L6-v2@ecbda11b"))


@pytest.mark.parametrize("width", [70, 60])
def test_on_a_narrow_screen_columns_become_lines_and_no_value_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    lines = printed(monkeypatch, capsys, width)
    assert sum("last sync" in line for line in lines) == len(ROWS)
    whole = "\n".join(lines)
    assert whole.count("2026-11-21 03:22:58Z") == whole.count("all-MiniLM-L6-v2@ecbda11b") == len(ROWS)


def test_nothing_is_said_to_be_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    output.data([], "Collections", COLUMNS, json=False)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "Collections: nothing\n")


def test_values_are_never_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output.Invocation, "layout", "table")
    output.table("[bold]", [{"collection": "[red]x", "rows": True}], ("collection", "rows"))
    shown = capsys.readouterr().out
    assert "[red]x" in shown
    assert "[bold]" in shown


def test_values_never_order_the_terminal_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output.Invocation, "layout", "table")
    sent = "\x1b]0;owned\x07 :key: \x9b2J \u202egnp"
    output.table(sent, [{"text": sent}], whole=False)
    output.say(sent)
    output.fail(sent)
    captured = capsys.readouterr()
    for seen, times in ((captured.out, 2), (captured.err, 2)):
        assert not set("\x1b\x07\x9b\u202e") & set(seen)
        assert seen.count(r"\x1b]0;owned\x07 :key: \x9b2J \u202egnp") == times


# ---------------------------------------------------------------------------------------------- terminal or programs

LOCAL = {"OWL_SAP_EMBEDDING__MODEL": "hash:16", "OWL_SAP_STORE__KIND": "local", "OWL_SAP_STORE__PATH": "vectors"}
COLLECTIONS = "".join(f'[[collections]]\nname = "{name}"\nsource = "S.T"\ntemplate = "{{X}}"\n' for name in ("a", "b"))


def on_a_terminal(folder: Path, *arguments: str, **variables: str) -> str:
    """What a person sees: stdout and stderr are a pseudo-terminal of 200 columns."""
    ours, theirs = pty.openpty()
    with owl_sap(
        *arguments,
        cwd=folder,
        env=environment(TERM="xterm-256color", **LOCAL) | variables,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                piece = os.read(ours, 65_536)
            except OSError:  # the other end is closed: so Linux says it
                break
            if not piece:
                break
            seen += piece
        os.close(ours)
        assert process.wait(60) == 0, seen.decode()
    return seen.decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "owl-sap.toml").write_text(COLLECTIONS)
    return tmp_path


def test_a_terminal_gets_tables_and_a_pipe_json_lines(folder: Path, cli: Cli) -> None:
    seen = on_a_terminal(folder, "status")
    assert "Collections" in seen
    assert "┃" in seen
    piped = [json.loads(line) for line in cli("status", **LOCAL).out.splitlines()]
    assert piped == cli("status", "--json", **LOCAL).json
    assert [line["collection"] for line in piped] == ["a", "b"]


def test_the_choice_holds_wherever_the_output_goes(folder: Path, cli: Cli) -> None:
    first = on_a_terminal(folder, "--output", "lines", "status").splitlines()[0]
    assert json.loads(first)["collection"] == "a"
    assert "Collections" in cli("--output", "table", "status", **LOCAL).out
    assert cli("--output", "table", "status", "--json", **LOCAL).json[1]["collection"] == "b"
    assert "--output" in cli("--help").out


def test_another_choice_is_a_usage_error(cli: Cli) -> None:
    run = cli("--output", "xml", "status", **LOCAL)
    assert (run.code, run.out) == (2, "")
    assert "--output" in run.err


def test_no_color_is_honoured(folder: Path) -> None:
    assert "\x1b[" in on_a_terminal(folder, "status")
    plain = on_a_terminal(folder, "status", NO_COLOR="1")
    assert not any(f"\x1b[{colour}m" in plain for colour in range(30, 38))


def test_settings_in_lines(folder: Path, cli: Cli) -> None:
    shown = [json.loads(line) for line in cli("config", "show", **LOCAL).out.splitlines()]
    assert {"setting": "embedding.model", "value": "hash:16"} in shown
    with_origin = [json.loads(line) for line in cli("config", "show", "--origin", **LOCAL).out.splitlines()]
    assert with_origin == cli("config", "show", "--origin", "--json", **LOCAL).json


def test_lines_hold_the_records_and_tables_what_is_for_people(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    shown: dict[str, Any] = {"ok": "yes", "text": "short…"}
    monkeypatch.setattr(output.Invocation, "layout", "lines")
    output.data([{"ok": True, "text": "a long text"}], "T", ("ok",), json=False, rows=[shown])
    assert json.loads(capfdbinary.readouterr().out) == {"ok": True, "text": "a long text"}


def _fails(run: Run) -> dict[str, int]:
    raise RowRejected("a reason that is long enough to need several lines of a narrow terminal " * 2)


@pytest.mark.parametrize("columns", ["80", "140"])
def test_the_ids_of_jobs_can_be_copied_from_a_terminal(folder: Path, columns: str) -> None:
    jobs = Jobs(FileRecords(folder / "vectors"), _fails, JobOptions(2, (RowRejected,)))
    ids = [jobs.start(name).id for name in ("a", "b")]
    deadline = time.monotonic() + 60
    while not all(jobs.get(number).over for number in ids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    jobs.close(2)
    seen = on_a_terminal(folder, "jobs", "list", COLUMNS=columns)
    assert all(number in seen for number in ids)
    assert "owl-sap jobs show" in seen


def test_a_full_disk_under_stdout_is_told_once(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        run = subprocess.run(
            [sys.executable, "-m", "app", "config", "show", "--json"],
            cwd=tmp_path,
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert run.returncode == 4
    assert "No space left on device" in run.stderr
    assert run.stderr.count("\n") == 1

"""The prompt of `owl-sap emulator sql`: statements from arguments, from a pipe or typed, and their results on screen.
Knows no settings and no way to connect.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from app.src.cli import output
from app.src.cli.exits import OK, USAGE, exit_code
from connector.errors import ConnectorError
from connector.hana.prompt import Answer, Prompt, StatementRefused, is_blank, split

_HELP = r"""Statements end with ; and may go over several lines.
\d          tables and views of the current schema
\d TABLE    columns of a table or view (SCHEMA.TABLE; quote names with small letters)
\q          leave (or Ctrl-D)"""
_LONGEST_VALUE = 200
_VECTOR_HEAD = 4
_NAME = re.compile(r'"((?:[^"]|"")+)"|([^".\s]+)')


def run_statements(prompt: Prompt, texts: Iterable[str], screen: Screen) -> int:
    """Run statements until one fails; return its exit code. Those without a result are summarised in one line."""
    changed: list[int] = []
    try:
        for text in texts:
            statements, rest = split(text)
            for statement in (*statements, *([] if is_blank(rest) else [rest.strip()])):
                answer = prompt.run(statement, screen.most_rows)
                screen.show(answer, quiet=True)
                if not answer.columns:
                    changed.append(answer.affected)
    except (ConnectorError, StatementRefused) as error:
        screen.changed(changed)
        return fail(error)
    screen.changed(changed)
    return OK


def fail(error: ConnectorError | StatementRefused) -> int:
    """Say what HANA said. Exit 3 for what the connection or the rights are short of, 2 for the statement itself."""
    output.fail(str(error))
    if not isinstance(error, StatementRefused):
        return exit_code(error)
    unavailable = error.kind.retryable or error.kind.__name__ in ("PermissionRefused", "LoginRefused")
    return 3 if unavailable else USAGE


class Screen:
    """Where results go: tables, JSON lines where nobody looks on, or with `json` one document (`finish` writes it)."""

    def __init__(self, json: bool, most_rows: int) -> None:
        self._json = json
        self._documents: list[dict[str, Any]] = []
        self.most_rows = most_rows

    def show(self, answer: Answer, *, quiet: bool = False) -> None:
        """`quiet`: say nothing of a statement without a result; `changed` does."""
        if answer.more:
            output.say(f"only the first {self.most_rows} rows; --max-rows shows more")
        if self._json:
            rows = [[_plain(value) for value in row] for row in answer.rows]
            self._documents.append({"columns": answer.columns, "rows": rows, "affected": answer.affected})
        elif not answer.columns:
            self.changed([] if quiet else [answer.affected])
        else:
            names = _distinct(answer.columns)
            shown = [{name: _shown(value) for name, value in zip(names, row, strict=True)} for row in answer.rows]
            plain = [{name: _plain(value) for name, value in zip(names, row, strict=True)} for row in answer.rows]
            title = "1 row" if len(shown) == 1 else f"{len(shown)} rows"
            output.table(title, shown, names, records=plain)

    def changed(self, affected: Sequence[int]) -> None:
        """One line for all statements without a result."""
        if affected and not self._json:
            rows = sum(affected)
            statements = f"{len(affected):,} statements " if len(affected) > 1 else ""
            output.say(f"{statements}done, {rows:,} {'row' if rows == 1 else 'rows'} affected")

    def finish(self) -> None:
        if self._json:
            output.write_json(self._documents)


def _distinct(names: Iterable[str]) -> list[str]:
    """A result may have two columns of one name."""
    found: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in found:
            number += 1
            candidate = f"{name} ({number})"
        found.append(candidate)
    return found


def _plain(value: Any) -> Any:
    """As JSON has it: bytes in hexadecimal; a vector is a list already."""
    return bytes(value).hex() if isinstance(value, bytes | bytearray | memoryview) else value


def _shown(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, list):
        head = ", ".join(f"{number:g}" for number in value[:_VECTOR_HEAD])
        return f"[{head}{', …' if len(value) > _VECTOR_HEAD else ''}] ({len(value)})"
    text = str(_plain(value))
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


# ------------------------------------------------------------------------------------------------------- interactively


def interact(prompt: Prompt, screen: Screen, history: Path | None) -> int:
    """Until \\q or the end of input. Errors are shown, and it goes on."""
    output.say(r"HANA emulator. Statements end with ; \? shows help, \q quits.")
    with _line_editing(history), _ctrl_c_is_ours():
        for text in _entries():
            try:
                if text.startswith("\\"):
                    _command(prompt, screen, text)
                else:
                    screen.show(prompt.run(text, screen.most_rows))
            except (ConnectorError, StatementRefused) as error:
                fail(error)
    return OK


def _entries() -> Iterator[str]:
    """One statement or command after the other, as it is typed."""
    pending = ""
    while True:
        try:
            line = input("...> " if pending else "sql> ")
        except EOFError:
            output.say("")
            return
        except KeyboardInterrupt:  # away with what was typed
            output.say("")
            pending = ""
            continue
        if not pending and line.startswith("\\"):
            if line.split()[0] == r"\q":
                return
            yield line
            continue
        statements, rest = split(f"{pending}{line}\n")
        pending = "" if is_blank(rest) else rest
        yield from statements


def _command(prompt: Prompt, screen: Screen, line: str) -> None:
    word, _, rest = line.strip().partition(" ")
    names = [quoted.replace('""', '"') or plain.upper() for quoted, plain in _NAME.findall(rest)]
    if word == r"\d" and len(names) <= 2:
        if not names:
            screen.show(prompt.tables(screen.most_rows))
            return
        answer = prompt.columns(names[0] if len(names) == 2 else "", names[-1], screen.most_rows)
        if answer.rows:
            screen.show(answer)
        else:
            output.say(f"there is no table or view {rest.strip()} here")
    else:
        output.say(_HELP)


@contextmanager
def _ctrl_c_is_ours() -> Iterator[None]:
    """Elsewhere it ends the verb, at the latest after some seconds; here it only forgets what was typed."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _line_editing(history: Path | None) -> Iterator[None]:
    """Arrow keys and earlier lines, kept in `history` where there is one."""
    try:
        import readline
    except ImportError:  # some systems have none: the prompt works without
        yield
        return
    if history is not None and sys.stdin.isatty():
        with suppress(OSError):
            readline.read_history_file(history)
    try:
        yield
    finally:
        if history is not None:
            with suppress(OSError):
                readline.write_history_file(history)

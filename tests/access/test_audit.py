"""The audit log as a file: lines that are whole, kept apart, moved away underneath it, and lost without harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.src.access import audit
from app.src.access.audit import AuditLog, shape_of
from connector.errors import ConfigurationError


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., tuple[AuditLog, list[int]]]]:
    made: list[AuditLog] = []

    def make(path: str | Path = tmp_path / "audit.log") -> tuple[AuditLog, list[int]]:
        lost: list[int] = []
        made.append(AuditLog(str(path), lost.append))
        return made[-1], lost

    yield make
    for log in made:
        log.close()


def entries(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def wait(until: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if until():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it never came")


def numbers(path: Path) -> list[int]:
    return [entry["n"] for entry in entries(path) if "n" in entry]


def test_one_line_an_entry_appended_to_what_is_there(make: Any, tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    file.write_text('{"n":0}\n', encoding="utf-8")
    log, lost = make()
    for number in range(1, 2000):
        log.record({"n": number, "text": "line\nbreak \ud800 \u2028 ü"})
    log.close()
    assert numbers(file) == list(range(2000))
    assert file.read_bytes().isascii()
    assert lost == []


def test_only_this_user_may_read_it(make: Any, tmp_path: Path) -> None:
    make()
    assert (tmp_path / "audit.log").stat().st_mode & 0o777 == 0o600


def test_two_processes_share_a_file(make: Any, tmp_path: Path) -> None:
    first, second = make()[0], make()[0]
    for number in range(1000):
        first.record({"n": number})
        second.record({"n": number})
    first.close()
    second.close()
    assert sorted(numbers(tmp_path / "audit.log")) == sorted([*range(1000), *range(1000)])


@pytest.mark.parametrize("how", ["rename", "remove"])
def test_a_file_that_was_moved_away_is_made_anew(make: Any, tmp_path: Path, how: str) -> None:
    file, moved = tmp_path / "audit.log", tmp_path / "audit.log.1"
    log, lost = make()
    log.record({"n": 1})
    wait(lambda: file.stat().st_size > 0)
    if how == "rename":
        file.rename(moved)
    else:
        file.unlink()
    log.record({"n": 2})
    log.close()
    assert numbers(file) == [2]
    assert how == "remove" or numbers(moved) == [1]
    assert lost == []


def test_what_cannot_be_written_is_lost_and_counted_and_the_next_is_written(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    file = folder / "audit.log"
    log, lost = make(file)
    file.unlink()
    folder.rmdir()
    log.record({"n": 1})
    wait(lambda: sum(lost) == 1)
    log.record({"n": 2})
    wait(lambda: sum(lost) == 2)
    folder.mkdir()
    log.record({"n": 3})
    log.close()
    assert numbers(file) == [3]
    (message,) = caplog.messages
    assert "lost (No such file or directory)" in message


FULL = """
import resource, signal, sys, time
from app.src.access import audit
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
lost = []
log = audit.AuditLog(sys.argv[1], lost.append)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (3 * len(b'{"n":0}\\n') + 4, hard))
for number in range(5):
    log.record({"n": number})
while lost != [1, 1]:
    time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
log.record({"n": 9})
log.close()
print(lost)
"""


def test_a_full_disk_tears_one_line_and_no_other(tmp_path: Path) -> None:
    """By the limit of a file's size, which the kernel enforces as it does a full disk: part of a write is done."""
    file = tmp_path / "audit.log"
    child = subprocess.run([sys.executable, "-c", FULL, str(file)], capture_output=True, text=True, check=True)
    assert child.stdout == "[1, 1]\n"
    lines = file.read_text(encoding="utf-8").split("\n")
    assert [json.loads(line)["n"] for line in lines if line.endswith("}")] == [0, 1, 2, 9]
    assert len([line for line in lines if line and not line.endswith("}")]) == 1, "the torn one, on a line of its own"


def test_more_than_can_be_written_is_lost_and_nobody_waits(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "WAITING", 10)
    log, lost = make()
    gate, held = threading.Event(), threading.Event()
    write = log._write

    def slow(line: bytes) -> None:
        held.set()
        assert gate.wait(60)
        write(line)

    monkeypatch.setattr(log, "_write", slow)
    log.record({"n": 0})
    assert held.wait(60)
    for number in range(1, 31):
        log.record({"n": number})
    assert lost == [1] * 20
    gate.set()
    log.close()
    assert numbers(tmp_path / "audit.log") == list(range(11))


def test_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    log = AuditLog("-", lambda lost: None)
    log.record({"n": 1})
    log.close()
    assert json.loads(capfd.readouterr().err) == {"n": 1}
    os.fstat(2)


@pytest.mark.parametrize("path", ["no-such-folder/audit.log", "."])
def test_a_file_that_cannot_be_opened_is_said_at_the_start(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"access\.audit.*cannot be opened"):
        AuditLog(str(tmp_path / path), lambda lost: None)


NAMES = {"MTART": "MTART", "/BIC/X": "BIC_X", "PRIO": "PRIO"}


@pytest.mark.parametrize(
    ("where", "shape"),
    [
        (None, None),
        ({}, None),
        ({"MTART": "secret"}, {"MTART": "$eq"}),
        ({"MTART": None}, {"MTART": "$eq"}),
        ({"MTART": {"$ne": None}}, {"MTART": "$ne"}),
        ({"/BIC/X": {"$in": ["secret"]}}, {"BIC_X": "$in"}),
        ({"secret": 1}, {"?": "$eq"}),
        ({"PRIO": {"$between": [1, 2]}}, {"PRIO": "$between"}),
        ({"MTART": {"$like": "secret%"}}, {"MTART": "$like"}),
        ({"MTART": {"$contains": "secret"}}, {"MTART": "$contains"}),
        (
            {"$or": [{"MTART": {"$nin": ["secret"]}}, {"$and": [{"PRIO": {"$gt": 1}}, {"PRIO": {"$lte": 4}}]}]},
            {"$or": [{"MTART": "$nin"}, {"$and": [{"PRIO": "$gt"}, {"PRIO": "$lte"}]}]},
        ),
        ({"MTART": {"$secret": 1}}, "invalid"),
        ({"a secret": 1}, "invalid"),
        ({"MTART": {"x": 1, "y": 2}}, "invalid"),
    ],
    ids=str,
)
def test_of_a_filter_its_shape_is_told_and_no_value(where: Any, shape: Any) -> None:
    assert shape_of(where, NAMES) == shape
    assert "secret" not in json.dumps(shape_of(where, NAMES))

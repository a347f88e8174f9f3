"""The command: its first line, exit codes, data kept across runs, and no orphans."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from emulator_sql import open_database
from hana_emulator.__main__ import main
from hana_emulator.testing import launch, running


def test_the_first_line_says_how_to_log_in(tmp_path: Path) -> None:
    with running("--data", str(tmp_path), "--user", "ME", "--password", "x-1", "--schema", "S") as emulator:
        assert (emulator.host, emulator.user, emulator.password, emulator.schema) == ("127.0.0.1", "ME", "x-1", "S")
        cursor = emulator.connect().cursor()
        cursor.execute("SELECT CURRENT_USER, CURRENT_SCHEMA FROM DUMMY")
        assert tuple(cursor.fetchone()) == ("ME", "S")
        assert emulator.stop() == 0


@pytest.mark.slow
def test_sample_tables_go_into_the_named_schema(tmp_path: Path) -> None:
    with running("--data", str(tmp_path), "--sample", "--user", "ME", "--schema", "OTHER") as emulator:
        cursor = emulator.connect().cursor()
        cursor.execute('SELECT COUNT(*) FROM "OTHER"."MARA"')
        assert cursor.fetchone()[0] > 100
        assert emulator.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signals_end_it_cleanly_with_clients_connected(tmp_path: Path, number: int) -> None:
    with running("--data", str(tmp_path)) as emulator:
        connection = emulator.connect()
        connection.cursor().execute("SELECT 1 FROM DUMMY")
        assert emulator.stop(number) == 0
        assert emulator.process.stderr is not None
        assert emulator.process.stderr.read() == ""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((emulator.host, emulator.port), timeout=5)


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_a_port_that_cannot_be_is_a_usage_error(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--port", port])
    assert caught.value.code == 2
    assert f"--port must be from 0 to 65535, not {port}" in capsys.readouterr().err


def test_committed_data_survives_a_restart_and_a_kill(tmp_path: Path) -> None:
    with running("--data", str(tmp_path)) as emulator:
        connection = emulator.connect()
        cursor = connection.cursor()
        cursor.execute('CREATE TABLE "Mixed Case/Ä" (A INTEGER PRIMARY KEY, B NVARCHAR(10))')
        cursor.execute('INSERT INTO "Mixed Case/Ä" VALUES (1, ?)', ("😀",))
        connection.commit()
        cursor.execute('INSERT INTO "Mixed Case/Ä" VALUES (2, ?)', ("lost",))
        assert emulator.stop(signal.SIGKILL) == -signal.SIGKILL
    with running("--data", str(tmp_path)) as emulator:
        cursor = emulator.connect().cursor()
        cursor.execute('SELECT * FROM "Mixed Case/Ä"')
        assert [tuple(row) for row in cursor.fetchall()] == [(1, "😀")]
        assert emulator.stop() == 0


def test_without_data_its_folder_is_temporary(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "hana_emulator"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    with process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["port"] > 0
            assert [path.name[:14] for path in tmp_path.iterdir()] == ["hana-emulator-"]
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "host", ["0.0.0.0", *(pytest.param(host, marks=pytest.mark.slow) for host in ("192.168.0.1", "example.org"))]
)
def test_it_refuses_to_listen_beyond_loopback(host: str, tmp_path: Path) -> None:
    with launch("--host", host, "--data", str(tmp_path / "unused")) as process:
        out, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert out == ""
    assert err == f"hana_emulator: the emulator listens on loopback only: use --host 127.0.0.1 instead of {host}\n"
    assert not (tmp_path / "unused").exists()


def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with launch("--port", str(port), "--data", str(tmp_path)) as process:
            _out, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert len(err.splitlines()) == 1
    assert "in use" in err


def test_a_folder_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with closing(open_database(tmp_path)), launch("--data", str(tmp_path)) as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert str(tmp_path) in err


@pytest.mark.slow
def test_it_ends_when_the_named_process_is_gone(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with other, running("--data", str(tmp_path), "--parent-pid", str(other.pid)) as emulator:
        time.sleep(0.3)
        assert emulator.process.poll() is None
        other.kill()
        other.wait()
        assert emulator.process.wait(60) == 0


def test_it_ends_with_a_killed_parent(tmp_path: Path) -> None:
    """The parent stays a zombie here, which still looks alive to a signal."""
    code = (
        "import os, subprocess, sys; "
        f"p = subprocess.Popen([sys.executable, '-m', 'hana_emulator', '--data', {str(tmp_path)!r}, "
        "'--parent-pid', str(os.getpid())]); print(p.pid, flush=True); p.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        lines = [parent.stdout.readline(), parent.stdout.readline()]
        port = next(json.loads(line)["port"] for line in lines if line.startswith("{"))
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
            sock.settimeout(60)
            parent.kill()
            assert sock.recv(1) == b""

"""SAP's drivers for other languages do everyday work on the emulator: batches, paging, LOBs, vectors, transactions,
errors. Skipped where language or driver is missing. NODE_PATH names a folder node_modules with hdb and
@sap/hana-client; GOPATH one with go-hdb, by default that of Debian's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hana_emulator.testing import running

FOLDER = Path(__file__).parent
GO = {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode"}


def command(driver: str) -> list[str]:
    """Return the start of the command of the driver's program; skip the test if it cannot run."""
    if driver == "go-hdb":
        program, check = "go", ["list", "github.com/SAP/go-hdb/driver"]
        run = ["run", str(FOLDER / "go_client.go")]
    else:
        program, check = "node", ["-e", f"require.resolve({driver!r})"]
        run = [str(FOLDER / "node_client.js"), driver]
    found = shutil.which(program)
    if found is None or subprocess.run([found, *check], capture_output=True, env={**GO, **os.environ}).returncode:
        pytest.skip(f"{program} or its package {driver} is not installed")
    return [found, *run]


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["hdb", "@sap/hana-client", "go-hdb"])
def test_everyday_work(driver: str) -> None:
    start = command(driver)
    with running() as emulator:
        login = [str(emulator.port), emulator.user, emulator.password]
        done = subprocess.run(
            [*start, *login], capture_output=True, text=True, timeout=240, env={**GO, **os.environ}, check=False
        )
        assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-2000:]

"""SAP's drivers for Node, hdb and @sap/hana-client, do everyday work on the emulator: batches, paging, LOBs, vectors,
transactions, errors. Skipped where Node or the package is missing; NODE_PATH names a folder node_modules."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hana_emulator.testing import running

PROGRAM = Path(__file__).with_name("node_client.js")


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["hdb", "@sap/hana-client"])
def test_everyday_work(driver: str) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not installed")
    found = subprocess.run([node, "-e", f"require.resolve({driver!r})"], capture_output=True, cwd=PROGRAM.parent)
    if found.returncode:
        pytest.skip(f"the package {driver} is not installed; install it and set NODE_PATH")
    with running() as emulator:
        command = [node, str(PROGRAM), driver, str(emulator.port), emulator.user, emulator.password]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-2000:]

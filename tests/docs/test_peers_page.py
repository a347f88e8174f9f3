"""The first connection that docs/peers.md shows works as it stands, but for the port."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hana_emulator.testing import running

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "peers.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_first_connection() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
    with running("--schema", "OWL") as emulator:
        command = [sys.executable, "-c", code.replace("30015", str(emulator.port))]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert re.findall(r"\bpump\b", run.stdout) == ["pump", "pump"]

"""A host made of stub commands: only what stands in one folder is on PATH, so "no Docker here" can be tested."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = (
    *("awk", "bash", "cat", "chmod", "cksum", "cp", "date", "df", "dirname", "env", "find", "flock", "grep", "head"),
    *("id", "ls", "mkdir", "mv", "rm", "sed", "sh", "sleep", "tail", "timeout", "touch", "tr"),
)

STUBS = ROOT / "tests/ops/stubs"
T4 = {
    "index": "0",
    "name": "Tesla T4",
    "uuid": "GPU-0",
    "compute_cap": "7.5",
    "driver_version": "580.95.05",
    "memory.total": "15360",
    "memory.used": "9120",
    "memory.free": "6240",
    "utilization.gpu": "98",
    "utilization.memory": "41",
    "temperature.gpu": "71",
    "power.draw": "69.80",
    "enforced.power.limit": "70.00",
    "power.limit": "70.00",
    "power.default_limit": "70.00",
    "power.min_limit": "60.00",
    "power.max_limit": "70.00",
    "fan.speed": "[N/A]",
    "persistence_mode": "Enabled",
    "clocks.current.sm": "1005",
    "clocks.max.sm": "1590",
    "clocks.current.memory": "5000",
    "clocks.max.memory": "5001",
    "pstate": "P0",
    "pcie.link.gen.current": "3",
    "pcie.link.gen.max": "3",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
    "ecc.mode.current": "Enabled",
    "ecc.errors.corrected.volatile.total": "1",
    "ecc.errors.uncorrected.volatile.total": "0",
    "ecc.errors.corrected.aggregate.total": "4",
    "ecc.errors.uncorrected.aggregate.total": "2",
    "retired_pages.single_bit_ecc.count": "3",
    "retired_pages.double_bit.count": "1",
    "retired_pages.pending": "No",
    "clocks_event_reasons.active": "0x0000000000000004",
}
"""What nvidia-smi says of a T4 under load."""

QUICK = {
    "OWL_DEPLOY_WAIT": "0",
    "OWL_DEPLOY_POLL": "0.1",
    "OWL_SAP_API__PORT": "1",
    "OWL_PROMETHEUS_PORT": "2",
    "OWL_GRAFANA_PORT": "3",
    "OWL_ALERTMANAGER_PORT": "4",
    "OWL_REPLICAS_PORT": "5",
}
"""Ports on which nothing listens."""
ENV_FILE = 'HANA_HOST=hana.test\nexport HANA_USER=OWL\nHANA_PASSWORD="s3cret-canary"\n'


@dataclass
class Host:
    """A folder with our scripts, a PATH of stubs, and the variables that steer the stubs."""

    folder: Path
    bin: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def log(self) -> str:
        path = self.folder / "stub.log"
        return path.read_text() if path.exists() else ""

    @property
    def environment(self) -> dict[str, str]:
        ours = {"STUB_LOG": str(self.folder / "stub.log"), "STUB_STATE": str(self.folder.parent / "docker")}
        return {"PATH": str(self.bin), **ours, **self.variables}

    def without(self, command: str) -> None:
        (self.bin / command).unlink()

    def stub(self, command: str, text: str) -> None:
        path = self.bin / command
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a link to the real command would be written through
        path.write_text(text)
        path.chmod(0o755)

    def card(self, changes: Mapping[str, str] | None = None, number: int = 0, without: Iterable[str] = ()) -> None:
        """Card `number` is a T4, but for `changes`; its driver does not know the fields `without`."""
        fields = {name: text for name, text in {**T4, **(changes or {})}.items() if name not in set(without)}
        path = self.folder.parent / "cards" / str(number)
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{name}={text}\n" for name, text in fields.items()))

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.bin / "bash"), script, *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )

    def json(self, script: str, *arguments: str) -> dict[str, Any]:
        result = self.run(script, *arguments)
        assert result.returncode == 0, result.stderr
        reading: dict[str, Any] = json.loads(result.stdout)
        return reading


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A T4 server on which everything is in order."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, f"{tool} is needed by the scripts and by this test"
        (tools / tool).symlink_to(found)
    folder = tmp_path / "owl"
    (folder / "scripts").mkdir(parents=True)
    for name in ("scripts/lib/deploy", "deployment/nginx"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("deploy_t4_optimized.sh", "docker-compose.t4-optimized.yml", "scripts/monitor_gpu.sh", "scripts/keys"):
        shutil.copy(ROOT / name, folder / name)
    (folder / ".env").write_text(ENV_FILE)
    (folder / ".env").chmod(0o600)
    (folder / "owl-sap.toml").write_text("")
    (folder / "owl-sap.toml").chmod(0o644)
    host = Host(folder, tools, dict(QUICK))
    for name in ("docker", "nvidia-smi", "../docker/bin/python", "../docker/bin/chown"):
        host.stub(name, (STUBS / Path(name).name).read_text())
    (tmp_path / "docker/tags").mkdir()
    host.card()
    return host

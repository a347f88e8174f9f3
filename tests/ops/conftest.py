"""A host made of stub commands: only what stands in one folder is on PATH, so "no Docker here" can be tested."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = (
    *("awk", "bash", "cat", "cksum", "date", "df", "dirname", "env", "find", "grep", "head", "id"),
    *("ls", "mkdir", "rm", "sed", "sleep", "tail", "touch", "tr"),
)

DOCKER = """#!/usr/bin/env bash
printf '%s\\n' "docker $*" >>"$STUB_LOG"
case "$*" in
  "info") [[ ${STUB_DAEMON:-up} == up ]] ;;
  "info --format {{json .Runtimes}}") printf '{"%s":{"path":"runc"}}\\n' "${STUB_RUNTIME:-nvidia}" ;;
  "info --format {{.DockerRootDir}}") echo / ;;
  "compose version") [[ ${STUB_COMPOSE:-v2} == v2 ]] ;;
  inspect*State.Running*) echo "${STUB_RUNNING:-false}" ;;
  inspect*State.Status*) [[ -n "${STUB_HEALTH-running healthy}" ]] && echo "${STUB_HEALTH-running healthy}" ;;
  compose*" build") [[ ${STUB_BUILD:-works} == works ]] || { echo "pip: no such wheel"; exit 17; } ;;
  run*) [[ ${STUB_RUN:-works} == works ]] ;;
  compose*up*) [[ ${STUB_UP:-works} == works ]] ;;
  logs*) echo "the last line of the service" ;;
  *) echo "stub docker does not know: $*" >&2; exit 99 ;;
esac
"""

NVIDIA_SMI = """#!/usr/bin/env bash
reading="0, Tesla T4, 580.95.05, 71, 98, 9120, 15360, 69.8, 70.00, 1005, 0x0000000000000004"
[[ -n "${STUB_GPU-yes}" ]] || { echo "No devices were found"; exit 6; }
case "$1" in
  *clocks_event_reasons*) [[ ${STUB_OLD_DRIVER:-no} == no ]] || { echo "Field is not valid"; exit 2; } ;;
esac
case "$1" in
  --query-gpu=driver_version,compute_cap,name) echo "${STUB_DRIVER:-580.95.05}, ${STUB_CAPABILITY:-7.5}, Tesla T4" ;;
  --query-gpu=index,*) printf '%s\\n' "${STUB_READING:-$reading}" ;;
  *) echo "stub nvidia-smi does not know: $*" >&2; exit 99 ;;
esac
"""

ENV_FILE = 'HANA_HOST=hana.example\nexport HANA_USER=OWL\nHANA_PASSWORD="s3cret-canary"\n'


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

    def without(self, command: str) -> None:
        (self.bin / command).unlink()

    def stub(self, command: str, text: str) -> None:
        path = self.bin / command
        path.write_text(text)
        path.chmod(0o755)

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), "STUB_LOG": str(self.folder / "stub.log"), **self.variables}
        command = [str(self.bin / "bash"), script, *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=30, check=False
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
    for name in ("deploy_t4_optimized.sh", "docker-compose.t4-optimized.yml", "scripts/monitor_gpu.sh"):
        shutil.copy(ROOT / name, folder / name)
    (folder / ".env").write_text(ENV_FILE)
    (folder / ".env").chmod(0o600)
    (folder / "owl-sap.toml").write_text("")
    host = Host(folder, tools, {"OWL_DEPLOY_WAIT": "1", "OWL_SAP_API__PORT": "1"})
    host.stub("docker", DOCKER)
    host.stub("nvidia-smi", NVIDIA_SMI)
    return host

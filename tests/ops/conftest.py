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
# Cards are files of "field=value" lines; a field that a driver does not know is refused as nvidia-smi does it.
here=${BASH_SOURCE[0]%/*}
[[ -n "${STUB_GPU-yes}" ]] || { echo "No devices were found"; exit 6; }
case "${1-}" in
  --query-gpu=driver_version,compute_cap,name) echo "${STUB_DRIVER:-580.95.05}, ${STUB_CAPABILITY:-7.5}, Tesla T4" ;;
  --query-gpu=*)
    [[ "${2-}" == --format=csv,noheader,nounits ]] || exit 98
    IFS=, read -ra fields <<<"${1#--query-gpu=}"
    for card in "$here"/../cards/*; do
      declare -A value=()
      while IFS== read -r field text; do value[$field]=$text; done <"$card"
      line=""
      for field in "${fields[@]}"; do
        [[ -n ${value[$field]+known} ]] || { echo "Field \\"$field\\" is not a valid field to query."; exit 2; }
        line+="${line:+, }${value[$field]}"
      done
      printf '%s\\n' "$line"
    done ;;
  --query-compute-apps=gpu_uuid,pid,used_memory) printf '%s\\n' "${STUB_PROCESSES-GPU-0, 4711, 812}" ;;
  --query-remapped-rows=*) printf '%s\\n' "${STUB_REMAPPED-GPU-0, [N/A], [N/A], [N/A]}" ;;
  dmon)
    [[ "$*" == "dmon -s t -c 1" ]] || exit 98
    printf '%s\\n' "${STUB_DMON-# gpu  rxpci  txpci
# Idx   MB/s   MB/s
    0    250     12}" ;;
  "") printf '| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05   CUDA Version: 13.0 |\\n' ;;
  *) echo "stub nvidia-smi does not know: $*" >&2; exit 99 ;;
esac
"""
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

    def card(self, changes: Mapping[str, str] | None = None, number: int = 0, without: Iterable[str] = ()) -> None:
        """Card `number` is a T4, but for `changes`; its driver does not know the fields `without`."""
        fields = {name: text for name, text in {**T4, **(changes or {})}.items() if name not in set(without)}
        path = self.folder.parent / "cards" / str(number)
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{name}={text}\n" for name, text in fields.items()))

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
    host.card()
    return host

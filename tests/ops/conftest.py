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
    *("awk", "bash", "cat", "chmod", "cksum", "cp", "date", "df", "dirname", "env", "find", "flock", "grep", "head", "id"),
    *("ls", "mkdir", "mv", "rm", "sed", "sh", "sleep", "tail", "timeout", "touch", "tr"),
)

DOCKER = """#!/usr/bin/env bash
# Tags of images and the container's image are files under $STUB_STATE; the rest is steered by variables.
call="docker $*"
printf '%s\\n' "${call%%$'\\n'*}" >>"$STUB_LOG"
tags=$STUB_STATE/tags
mkdir -p "$tags"
health() {
  if [[ $1 == c-worker ]]; then echo "${STUB_WORKER:-running healthy}"
  elif [[ -n ${STUB_BAD:-} && $(cat "$STUB_STATE/container") == "$STUB_BAD" ]]; then echo "running unhealthy"
  elif [[ -n "${STUB_HEALTH-running healthy}" ]]; then [[ -e $STUB_STATE/container ]] && echo "${STUB_HEALTH-running healthy}"
  fi
}
compose() {
  [[ $1 == -f ]] && shift 2
  [[ $1 == --profile ]] && shift 2
  case "$*" in
    build)
      case ${STUB_BUILD:-works} in
        fails) echo "pip: no such wheel"; exit 17 ;;
        hangs) touch "$STUB_STATE/building"; sleep 20 ;;
      esac
      echo "${STUB_BUILT-sha256:one}" >"$tags/owl-sap-connector:t4" ;;
    "up -d --no-build")
      [[ ${STUB_UP:-works} == works ]] || exit 1
      [[ ${STUB_UP_HANGS:-} == "" ]] || { touch "$STUB_STATE/starting"; sleep 20; }
      cmp=$(cat "$STUB_STATE/container" 2>/dev/null) new=$(cat "$tags/owl-sap-connector:t4")
      [[ $cmp == "$new" ]] || { echo "$new" >"$STUB_STATE/container"; echo "recreated $new" >>"$STUB_STATE/recreated"; } ;;
    "ps -q worker") [[ -e $STUB_STATE/container ]] && echo c-worker ;;
    "ps -q "*) [[ -e $STUB_STATE/container ]] && echo "c-$3" ;;
    ps) echo "NAME  SERVICE  STATUS" ;;
    *) echo "stub compose does not know: $*" >&2; exit 99 ;;
  esac
}
case "$*" in
  "info") [[ ${STUB_DAEMON:-up} == up ]] ;;
  "info --format {{json .Runtimes}}") printf '{"%s":{"path":"runc"}}\\n' "${STUB_RUNTIME:-nvidia}" ;;
  "info --format {{.DockerRootDir}}") echo / ;;
  "compose version") [[ ${STUB_COMPOSE:-v2} == v2 ]] ;;
  compose*) shift; compose "$@" ;;
  "image inspect --format {{.Id}} "*) cat "$tags/$5" 2>/dev/null ;;
  "image inspect --format {{index "*version*) echo 0.1.0 ;;
  "image inspect --format {{index "*revision*) echo abc1234 ;;
  tag*)
    if [[ -e $tags/$2 ]]; then cp "$tags/$2" "$tags/$3"; else echo "$2" >"$tags/$3"; fi ;;
  rmi*) rm -f "$tags/$2" ;;
  "ps -q --filter id="*) [[ "${STUB_PUBLISHES:-}" == "" || "$*" == *"publish=$STUB_PUBLISHES" ]] && echo "${4#id=}" ;;
  "inspect --format {{.Image}} "*) cat "$STUB_STATE/container" 2>/dev/null ;;
  inspect*State.Status*) health "${!#}" ;;
  *"--entrypoint nvidia-smi"*) [[ ${STUB_RUN:-works} == works ]] ;;
  *"--entrypoint sh"*make-secrets*)
    # What the container would do, in the folder that it would see.
    while [[ $1 != -c ]]; do shift; done
    script=$2
    shift 6
    PATH=$STUB_STATE/bin:$PATH STUB_FOLDER=$PWD/secrets sh -c "$script" make-secrets "$PWD/secrets" 10001 "$(id -g)" "$@" ;;
  *"--entrypoint python"*deploy_key) echo "search in materials: 3 hits in 12 ms"; [[ ${STUB_SEARCH:-works} == works ]] ;;
  exec*) echo "measured: Tesla T4: fp16 products 23.8 TFLOP/s"; [[ ${STUB_MEASURE:-works} == works ]] ;;
  "run "*"owl-sap-connector:t4 keys "*) ;;
  logs*) echo "the last line of the service" ;;
  *) echo "stub docker does not know: $*" >&2; exit 99 ;;
esac
"""

PYTHON = """#!/usr/bin/env bash
# `python -m app keys create NAME ... --out FILE`, and `python -c PROGRAM` that writes a password.
if [[ $1 == -c ]]; then printf 'k3y-canary-password'; exit; fi
[[ "$1 $2 $3 $4" == "-m app keys create" ]] || exit 98
[[ ${STUB_KEYS:-works} == works ]] || { echo "keys: no space left" >&2; exit 1; }
printf 'k3y-canary-%s' "$5" >"${!#}"
printf '{"keys": []}' >"${OWL_SAP_ACCESS__KEYS:-$STUB_FOLDER/keys.json}"
echo "k3y-canary-$5"
"""

NVIDIA_SMI = """#!/usr/bin/env bash
# Cards are files of "field=value" lines; a field that a driver does not know is refused as nvidia-smi does it.
here=${BASH_SOURCE[0]%/*}
[[ -n "${STUB_GPU-yes}" ]] || { echo "No devices were found"; exit 6; }
[[ $# -lt 3 ]] || printf '%s\\n' "nvidia-smi $*" >>"$STUB_LOG"
cards=("$here"/../cards/*)
if [[ "${1-}" == -i ]]; then
  cards=("$here/../cards/$2")
  shift 2
fi
# set FIELD VALUE
set_field() {
  [[ -z ${STUB_SMI_REFUSES:-} ]] || { echo "Insufficient Permissions"; exit 4; }
  sed -i "s/^$1=.*/$1=$2/" "${cards[0]}"
}
case "${1-}" in
  --query-gpu=driver_version,compute_cap,name) echo "${STUB_DRIVER:-580.95.05}, ${STUB_CAPABILITY:-7.5}, Tesla T4" ;;
  --query-gpu=*)
    [[ "${2-}" == --format=csv,noheader,nounits ]] || exit 98
    IFS=, read -ra fields <<<"${1#--query-gpu=}"
    for card in "${cards[@]}"; do
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
  -pm) [[ ${STUB_PERSISTENCE:-} == deaf ]] || set_field persistence_mode "$([[ $2 == 1 ]] && echo Enabled || echo Disabled)" ;;
  -pl) set_field power.limit "$2" ;;
  -lgc) set_field locked "$2" ;;
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
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=30, check=False
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
    shutil.copytree(ROOT / "scripts/lib/deploy", folder / "scripts/lib/deploy")
    for name in ("deploy_t4_optimized.sh", "docker-compose.t4-optimized.yml", "scripts/monitor_gpu.sh", "scripts/keys"):
        shutil.copy(ROOT / name, folder / name)
    (folder / ".env").write_text(ENV_FILE)
    (folder / ".env").chmod(0o600)
    (folder / "owl-sap.toml").write_text("")
    host = Host(folder, tools, dict(QUICK))
    host.stub("docker", DOCKER)
    host.stub("nvidia-smi", NVIDIA_SMI)
    host.stub("../docker/bin/python", PYTHON)
    host.stub("../docker/bin/chown", "#!/usr/bin/env bash\nprintf 'chown %s %s\\n' \"$1\" \"${2##*/}\" >>\"$STUB_LOG\"\n")
    host.card()
    return host

#!/usr/bin/env bash
# Build and start the service on a T4 server with Docker Compose, after checking that the host can run it.
# Every refusal is one line: what is wrong, and what to do. Changes no GPU setting and prints no value from .env.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 2

readonly compose_file=docker-compose.t4-optimized.yml container=owl-sap-connector-t4 image=owl-sap-connector:t4
readonly driver_floor=525 driver_cuda13=580 disk_floor_gib=20

usage() {
  cat <<'USAGE'
usage: ./deploy_t4_optimized.sh [--dry-run | --status] [--no-build]
  --dry-run    check the host and print what would be done; build and start nothing
  --status     show the container, its health and the GPU; change nothing
  --no-build   start the image that is there
Needs .env (see .env.example) and owl-sap.toml (see owl-sap.example.toml) in this folder.
OWL_DEPLOY_WAIT: seconds to wait until the service is ready (default 300).
USAGE
}

refuse() {
  printf 'deploy: %s\n' "$*" >&2
  exit 1
}
say() { printf '%s\n' "$*"; }

mode=deploy
build=yes
for argument in "$@"; do
  case $argument in
    --dry-run) mode=dry-run ;;
    --status) mode=status ;;
    --no-build) build=no ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
done

compose=()
check_docker() {
  command -v docker >/dev/null 2>&1 ||
    refuse "docker was not found. Install Docker Engine: https://docs.docker.com/engine/install/ (without Docker: pip install -e '.[hana,engine]' && owl-sap serve)"
  docker info >/dev/null 2>&1 ||
    refuse "the Docker daemon does not answer. Start it (sudo systemctl start docker) or join the group docker."
  if docker compose version >/dev/null 2>&1; then
    compose=(docker compose -f "$compose_file")
  elif command -v docker-compose >/dev/null 2>&1; then
    compose=(docker-compose -f "$compose_file")
    say "note: using docker-compose v1, which is at its end of life; the plugin docker-compose-plugin replaces it."
  else
    refuse "Docker Compose was not found. Install the plugin (apt install docker-compose-plugin)."
  fi
}

check_nvidia_runtime() {
  docker info --format '{{json .Runtimes}}' 2>/dev/null | grep -q nvidia && return
  nvidia-ctk cdi list 2>/dev/null | grep -q 'nvidia.com/gpu' && return
  refuse "Docker has no NVIDIA runtime. Install nvidia-container-toolkit, then: sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
}

torch_spec=""
check_gpu() {
  local answer driver capability name
  command -v nvidia-smi >/dev/null 2>&1 || refuse "nvidia-smi was not found. Install the NVIDIA driver, branch R580."
  answer=$(nvidia-smi --query-gpu=driver_version,compute_cap,name --format=csv,noheader 2>/dev/null | head -n 1)
  IFS=, read -r driver capability name <<<"$answer"
  [[ $driver =~ ^[0-9]+\. && $capability =~ ^\ *[0-9]+\.[0-9]+$ ]] ||
    refuse "nvidia-smi reports no GPU. Is the driver loaded? Look at: nvidia-smi"
  [[ ${driver%%.*} -ge $driver_floor ]] ||
    refuse "driver $driver is too old: torch for this card needs $driver_floor or newer, best R580. Update the driver."
  # Compared as one number: 7.5 -> 75, 10.0 -> 100.
  [[ $(tr -d '. ' <<<"$capability") -ge 75 ]] ||
    refuse "${name# } has compute capability ${capability# }; torch's wheels on PyPI start at 7.5 (T4). Use a T4 or newer."
  torch_spec='torch==2.13.*'
  if [[ ${driver%%.*} -lt $driver_cuda13 ]]; then
    torch_spec='torch==2.10.*'
    say "note: driver $driver is older than $driver_cuda13, so torch 2.10 (CUDA 12.8) is built in instead of 2.13 (CUDA 13)."
  fi
  say "GPU: ${name# }, driver $driver, compute capability ${capability# }"
}

# env_has NAME...: does .env give one of these names a value? Values are never read into a variable or printed.
env_has() {
  local name
  for name in "$@"; do
    grep -Eq "^[[:space:]]*(export[[:space:]]+)?$name=[\"']?[^\"'[:space:]]" .env && return 0
  done
  return 1
}

# hana_toml_has KEY: does [hana] in owl-sap.toml set it?
hana_toml_has() {
  awk -v key="$1" '/^[[:space:]]*\[/ { inside = /^[[:space:]]*\[hana\]/ }
    inside && $0 ~ "^[[:space:]]*" key "[[:space:]]*=" { found = 1 } END { exit !found }' owl-sap.toml
}

check_settings() {
  local key missing=()
  [[ -f .env ]] || refuse ".env is missing. Make it from the example and fill it in: cp .env.example .env && chmod 600 .env"
  [[ -r .env ]] || refuse ".env cannot be read by $(id -un). Give it to that user: sudo chown $(id -un) .env"
  # Docker would make a folder of this name if the file were missing.
  [[ -f owl-sap.toml ]] || refuse "owl-sap.toml is missing. Make it from the example: cp owl-sap.example.toml owl-sap.toml"
  for key in HOST USER PASSWORD; do
    env_has "HANA_$key" "HANA_${key}_FILE" "OWL_SAP_HANA__$key" "OWL_SAP_HANA__${key}_FILE" || hana_toml_has "${key,,}" ||
      missing+=("HANA_$key")
  done
  [[ ${#missing[@]} -eq 0 ]] || refuse ".env gives no value to ${missing[*]}. Add it there; .env.example describes each."
  [[ -z $(find .env -perm /077 2>/dev/null) ]] || say "note: .env can be read by others on this machine: chmod 600 .env"
}

port() {
  local value
  value=$(sed -nE "s/^[[:space:]]*(export[[:space:]]+)?OWL_SAP_API__PORT=[\"']?([0-9]+).*/\2/p" .env 2>/dev/null | tail -n 1)
  printf '%s' "${OWL_SAP_API__PORT:-${value:-8000}}"
}

running() { [[ $(docker inspect --format '{{.State.Running}}' "$container" 2>/dev/null) == true ]]; }

check_port() {
  # Our own container on the port is what a second deployment finds, and replaces.
  running && return
  if (exec 3<>"/dev/tcp/127.0.0.1/$(port)") 2>/dev/null; then
    refuse "port $(port) on 127.0.0.1 is taken. Stop what listens there (sudo ss -ltnp) or set OWL_SAP_API__PORT in .env."
  fi
}

check_disk() {
  local folder free
  [[ $build == yes ]] || return 0
  folder=$(docker info --format '{{.DockerRootDir}}' 2>/dev/null)
  [[ -d $folder ]] || folder=.
  free=$(df -Pk "$folder" | awk 'NR == 2 { print int($4 / 1048576) }')
  [[ $free -ge $disk_floor_gib ]] ||
    refuse "$free GiB free in $folder, the build needs $disk_floor_gib. Make room, for example: docker system prune"
}

health() { docker inspect --format '{{.State.Status}} {{if .State.Health}}{{.State.Health.Status}}{{end}}' "$container" 2>/dev/null; }

wait_until_ready() {
  local limit=${OWL_DEPLOY_WAIT:-300} state
  SECONDS=0
  say "waiting until the service is ready (at most $limit s)"
  while [[ $SECONDS -le $limit ]]; do
    state=$(health)
    case $state in
      "running healthy") return 0 ;;
      exited* | dead* | restarting* | *unhealthy) break ;;
    esac
    sleep 2
  done
  docker logs --tail 20 "$container" >&2 2>&1
  refuse "the service did not become ready (${state:-no container}); its last lines stand above. More: docker logs $container"
}

show_status() {
  local state
  state=$(health)
  [[ -n $state ]] || refuse "there is no container $container. Deploy it: ./deploy_t4_optimized.sh"
  say "$container: $state, http://127.0.0.1:$(port)"
  ./scripts/monitor_gpu.sh --once
}

check_host() {
  check_docker
  check_nvidia_runtime
  check_gpu
  check_settings
  check_port
  check_disk
}

# step WHAT COMMAND...: run it, or say so in a dry run
step() {
  local failure=$1
  shift
  say "+ $*"
  [[ $mode == dry-run ]] || "$@" || refuse "$failure"
}

deploy() {
  export OWL_TORCH=${OWL_TORCH:-$torch_spec}
  if [[ $build == yes ]]; then
    say "torch for this driver: $OWL_TORCH"
    step "the image could not be built; the message above says why. What runs now was left as it is." "${compose[@]}" build
  fi
  step "a container cannot see the GPU. Try: docker run --rm --gpus all ubuntu nvidia-smi" \
    docker run --rm --gpus all --entrypoint nvidia-smi "$image" -L
  # Docker would make it too, but as root's.
  [[ -d secrets ]] || step "the folder secrets could not be made; the message above says why." mkdir secrets
  step "the container could not be started; the message above says why." "${compose[@]}" up -d --no-build
  if [[ $mode == dry-run ]]; then
    say "dry run: the host is fit, nothing was changed."
    return
  fi
  wait_until_ready
  say "ready: http://127.0.0.1:$(port)/docs  (metrics: /metrics, status: ./deploy_t4_optimized.sh --status)"
}

if [[ $mode == status ]]; then
  check_docker
  show_status
else
  check_host
  deploy
fi

# shellcheck shell=bash
# Sourced by deploy_t4_optimized.sh: can this machine run it? Each refusal names the remedy. Changes nothing.
# shellcheck disable=SC2154  # names of base.sh and of the script itself

# The disk holds about 3 GB of downloaded packages and 6 GB of unpacked ones: in the stages build and runtime, and in the
# image before. The rest is for monitoring (5 GB of Prometheus) and the build cache.
readonly driver_floor=525 driver_cuda13=580 disk_floor_gib=30

# shellcheck disable=SC2034  # replica_ran is read where the containers are started
compose=() replica_ran=no

# container_of SERVICE [OPTION...]: its container, also a stopped one; nothing when there is none. Running ones come first,
# because -a also lists what `compose run` left behind.
container_of() {
  local id
  [[ $1 != api ]] || { printf '%s' "$container"; return; }
  id=$("${compose[@]}" "${@:2}" ps -q "$1" 2>/dev/null | head -n 1)
  [[ -n $id ]] || id=$("${compose[@]}" "${@:2}" ps -aq "$1" 2>/dev/null | head -n 1)
  printf '%s' "$id"
}

check_docker() {
  command -v docker >/dev/null 2>&1 ||
    refuse "docker was not found. Install Docker Engine: https://docs.docker.com/engine/install/ (without Docker: pip install -e '.[hana,engine,serve]' && owl-sap serve)"
  docker info >/dev/null 2>&1 ||
    refuse "the Docker daemon does not answer. Start it (sudo systemctl start docker) or join the group docker."
  if docker compose version >/dev/null 2>&1; then
    compose=(docker compose -f "$compose_file")
  elif command -v docker-compose >/dev/null 2>&1; then
    compose=(docker-compose -f "$compose_file")
    export DOCKER_BUILDKIT=1 COMPOSE_DOCKER_CLI_BUILD=1 # or it would build without the mounts of the Dockerfile
    note "using docker-compose v1, which is at its end of life; the plugin docker-compose-plugin replaces it."
  else
    refuse "Docker Compose was not found. Install the plugin (apt install docker-compose-plugin)."
  fi
  # Known to compose in every mode, so that --status shows these services too, and --no-monitoring leaves them alone.
  [[ $monitoring == no && $mode != status ]] || compose+=(--profile monitoring)
  # A second service, running or stopped, belongs to every deployment, or it would go on with another image than the first one.
  # shellcheck disable=SC2034
  [[ -z $(container_of replica --profile replicas) ]] || replica_ran=yes replicas=yes
  [[ $replicas == no ]] || compose+=(--profile replicas)
}

check_nvidia_runtime() {
  docker info --format '{{json .Runtimes}}' 2>/dev/null | grep -q nvidia && return
  nvidia-ctk cdi list 2>/dev/null | grep -q 'nvidia.com/gpu' && return
  refuse "Docker has no NVIDIA runtime. Install nvidia-container-toolkit, then: sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
}

# Of the torch that is built in, by the driver.
cuda=13
check_gpu() {
  local answer driver capability name
  command -v nvidia-smi >/dev/null 2>&1 || refuse "nvidia-smi was not found. Install the NVIDIA driver, branch R580."
  [[ ${setting[GPU_DEVICE_ID]} =~ ^[0-9]+$ ]] || refuse "GPU_DEVICE_ID is no number of a card. Correct it in .env: 0, 1, ... as nvidia-smi shows them."
  answer=$(nvidia-smi -i "${setting[GPU_DEVICE_ID]}" --query-gpu=driver_version,compute_cap,name --format=csv,noheader 2>/dev/null | head -n 1)
  IFS=, read -r driver capability name <<<"$answer"
  [[ $driver =~ ^[0-9]+\. && $capability =~ ^\ *[0-9]+\.[0-9]+$ ]] ||
    refuse "nvidia-smi reports no GPU ${setting[GPU_DEVICE_ID]}. Is the driver loaded, and GPU_DEVICE_ID right? Look at: nvidia-smi"
  [[ ${driver%%.*} -ge $driver_floor ]] ||
    refuse "driver $driver is too old: torch for this card needs $driver_floor or newer, best R580. Update the driver."
  # Compared as one number: 7.5 -> 75, 10.0 -> 100.
  [[ $(tr -d '. ' <<<"$capability") -ge 75 ]] ||
    refuse "${name# } has compute capability ${capability# }; torch's wheels on PyPI start at 7.5 (T4). Use a T4 or newer."
  if [[ ${driver%%.*} -lt $driver_cuda13 ]]; then
    # shellcheck disable=SC2034  # read by the script itself
    cuda=12
    [[ $action != deploy || $build == no || ${setting[OWL_CUDA]} != 13 ]] ||
      refuse "OWL_CUDA is 13, which needs driver $driver_cuda13 or newer, and this is $driver. Take it out of .env, or update the driver."
    note "driver $driver is older than $driver_cuda13, so torch 2.10 (CUDA 12.8) is built in instead of 2.13 (CUDA 13)."
  fi
  say "GPU: ${name# }, driver $driver, compute capability ${capability# }"
  [[ $replicas == no ]] || share_card
}

# With a second service three processes compute on the card.
share_card() {
  export OWL_API_MEMORY_FRACTION=${setting[OWL_API_MEMORY_FRACTION]:-0.25} OWL_WORKER_MEMORY_FRACTION=${setting[OWL_WORKER_MEMORY_FRACTION]:-0.3}
  awk -v api="$OWL_API_MEMORY_FRACTION" -v worker="$OWL_WORKER_MEMORY_FRACTION" 'BEGIN { exit !(2 * api + worker < 0.9) }' ||
    refuse "twice OWL_API_MEMORY_FRACTION and OWL_WORKER_MEMORY_FRACTION are 0.9 of the card or more. Lower them in .env, or take them out (0.25 and 0.3)."
}

# ours SERVICE PORT: does our own container publish it? That is what a second deployment finds, and replaces.
ours() {
  local id
  id=$("${compose[@]}" ps -q "$1" 2>/dev/null | head -n 1)
  [[ -n $id && -n $(docker ps -q --filter "id=$id" --filter "publish=$2" 2>/dev/null) ]]
}

listens() { (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; }

# check_port SERVICE VARIABLE
check_port() {
  local port=${setting[$2]} address=127.0.0.1
  [[ $port =~ ^[0-9]{1,5}$ && $port -ge 1 && $port -le 65535 ]] || refuse "$2 is no port from 1 to 65535. Correct it in .env."
  [[ $1 != api ]] || address=$local_address
  ours "$1" "$port" && return
  listens "$address" "$port" || return 0
  refuse "port $port on $address, for $1, is taken. Stop what listens there (sudo ss -ltnp) or set $2 in .env."
}

check_ports() {
  local names=(api) variables=(OWL_SAP_API__PORT) index other
  [[ $replicas == no ]] || names+=(proxy) variables+=(OWL_REPLICAS_PORT)
  [[ $monitoring == no ]] || names+=(prometheus grafana alertmanager) variables+=(OWL_PROMETHEUS_PORT OWL_GRAFANA_PORT OWL_ALERTMANAGER_PORT)
  for ((index = 0; index < ${#names[@]}; index++)); do
    check_port "${names[index]}" "${variables[index]}"
    for ((other = 0; other < index; other++)); do
      [[ ${setting[${variables[index]}]} != "${setting[${variables[other]}]}" ]] ||
        refuse "${variables[other]} and ${variables[index]} are the same port. Give each its own in .env."
    done
  done
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

# Tokens expire by this clock, certificates too.
check_clock() {
  [[ $(timedatectl show --property=NTPSynchronized --value 2>/dev/null) != no ]] ||
    note "the clock is not synchronised; tokens and certificates are judged by it: sudo timedatectl set-ntp true"
}

check_host() {
  check_docker
  check_nvidia_runtime
  check_gpu
  check_settings
  check_ports
  check_disk
  check_clock
}

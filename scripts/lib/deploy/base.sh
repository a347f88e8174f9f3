# shellcheck shell=bash
# Sourced by deploy_t4_optimized.sh: names, messages, the lock and what an interruption says. Reading it changes nothing.

# shellcheck disable=SC2034  # used by the other files of this folder
{
  readonly compose_file=docker-compose.t4-optimized.yml container=owl-sap-connector-t4
  readonly image=owl-sap-connector:t4 previous_image=owl-sap-connector:t4-previous failed_image=owl-sap-connector:t4-failed
  readonly state=.owl-deploy user_id=10001
}

# What is going on, and what that leaves behind when it is interrupted.
phase="checking the host"
phase_leaves="Nothing was changed."
mode=deploy

say() {
  printf '%s\n' "$*"
  record "$*"
}

note() { say "note: $*"; }

# warn MESSAGE: a failure that does not end the deployment
warn() {
  printf 'deploy: %s\n' "$*" >&2
  record "$*"
}

refuse() {
  warn "$*"
  exit 1
}

# record MESSAGE: to the log, once the folder of the state is there. No value of .env ever comes this way.
record() {
  [[ $mode == deploy && -d $state ]] || return 0
  TZ=UTC printf '%(%Y-%m-%dT%H:%M:%SZ)T %s\n' -1 "$*" >>"$state/deploy.log"
}

# step FAILURE COMMAND...: run it, or in a dry run only say so
step() {
  local failure=$1
  shift
  say "+ $*"
  [[ $mode == dry-run ]] || "$@" || refuse "$failure"
}

# phase WHAT WHAT_IT_LEAVES
begin() {
  phase=$1
  phase_leaves=$2
}

# Ctrl-C reaches the commands too, which end first. The lock goes with the process.
interrupted() {
  warn "interrupted while $phase. $phase_leaves"
  exit $((128 + $1))
}

# One deployment at a time in this folder. The kernel lets the lock go however the process ends.
take_lock() {
  mkdir -p "$state" || refuse "the folder $state cannot be made here by $(id -un). Give that user this folder."
  exec 9>"$state/lock" || refuse "$state/lock cannot be written by $(id -un). Deploy as the user who did it first."
  if ! command -v flock >/dev/null 2>&1; then
    note "flock was not found (package util-linux): nothing keeps two deployments apart."
  elif ! flock -n 9; then
    refuse "another deployment runs in this folder. Wait for its end, or look at it: ./deploy_t4_optimized.sh --status"
  fi
}

# The service's own certificate, where owl-sap.toml names one.
api_certificate() {
  awk -F "[\"']" '/^[[:space:]]*\[/ { inside = /^[[:space:]]*\[api\]/ }
    inside && /^[[:space:]]*tls_certificate[[:space:]]*=/ { print $2; exit }' owl-sap.toml 2>/dev/null
}

# Addresses, ports, the card's number and what is built, as compose will take them: the environment, else .env, else the default.
local_address=127.0.0.1 certificate="" url=""
declare -A setting=([OWL_SAP_API__PORT]=8000 [OWL_PUBLISH]=127.0.0.1 [OWL_PROMETHEUS_PORT]=9090 [OWL_GRAFANA_PORT]=3000
  [OWL_ALERTMANAGER_PORT]=9093 [OWL_REPLICAS_PORT]=8080
  [OWL_API_MEMORY_FRACTION]="" [OWL_WORKER_MEMORY_FRACTION]="" [OWL_ALERTMANAGER_CONFIG]=./monitoring/alertmanager/alertmanager.yml
  [GPU_DEVICE_ID]=0 [OWL_SAP_API__TLS_CERTIFICATE]="" [OWL_CUDA]="" [OWL_REVISION]="" [OWL_WORKER_CPUS]="")
read_settings() {
  local name value names
  names=$(printf '|%s' "${!setting[@]}")
  while IFS='=' read -r name value; do
    [[ -z $value ]] || setting[$name]=$value
  done < <(sed -nE "s/^[[:space:]]*(export[[:space:]]+)?(${names#|})=[\"']?([0-9A-Za-z.:\/_-]*).*/\2=\3/p" .env 2>/dev/null)
  for name in "${!setting[@]}"; do setting[$name]=${!name:-${setting[$name]}}; done
  # How this machine itself reaches what is published.
  local_address=${setting[OWL_PUBLISH]/#0.0.0.0/127.0.0.1}
  certificate=${setting[OWL_SAP_API__TLS_CERTIFICATE]:-$(api_certificate)}
  url="http${certificate:+s}://$local_address:${setting[OWL_SAP_API__PORT]}"
}

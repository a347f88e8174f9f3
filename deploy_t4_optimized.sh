#!/usr/bin/env bash
# Build and start the service on a T4 server with Docker Compose, after checking that the host can run it.
# Every error is one line: what is wrong, and what to do. Prints no value from .env; changes a setting of the card
# only with --apply-gpu-settings. The parts are in scripts/lib/deploy.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 2
# shellcheck source=scripts/lib/deploy/base.sh
source scripts/lib/deploy/base.sh || exit 2
# shellcheck source=scripts/lib/deploy/host.sh
source scripts/lib/deploy/host.sh
# shellcheck source=scripts/lib/deploy/settings.sh
source scripts/lib/deploy/settings.sh
# shellcheck source=scripts/lib/deploy/gpu.sh
source scripts/lib/deploy/gpu.sh
# shellcheck source=scripts/lib/deploy/release.sh
source scripts/lib/deploy/release.sh
# shellcheck source=scripts/lib/deploy/proof.sh
source scripts/lib/deploy/proof.sh

usage() {
  cat <<'USAGE'
usage: ./deploy_t4_optimized.sh [--dry-run] [--no-build] [--no-monitoring] [--replicas] [--apply-gpu-settings]
       ./deploy_t4_optimized.sh [--dry-run] --rollback | --status
  --dry-run             check the host and print what would be done; build, start and change nothing
  --no-build            start the existing image
  --no-monitoring       leave out dcgm-exporter, Prometheus, Alertmanager and Grafana
  --replicas            a second service, and a proxy before both (OWL_REPLICAS_PORT); kept until you remove them
  --apply-gpu-settings  set persistence, and power and clocks if OWL_GPU_POWER_LIMIT and OWL_GPU_CLOCKS are given; print the undo
  --rollback            start the previous image (run again: return to this one)
  --status              show containers, version, last deployment and the GPU; change nothing
Needs .env (see .env.example) and owl-sap.toml (see owl-sap.example.toml) in this folder. Creates missing keys and
passwords in the folder secrets. More: docs/deployment.md.
OWL_DEPLOY_WAIT: seconds to wait until the service is ready (default 420).
USAGE
}

# shellcheck disable=SC2034  # read by the parts
action=deploy build=yes monitoring=yes replicas=no apply_gpu=no
for argument in "$@"; do
  case $argument in
    --dry-run) mode=dry-run ;;
    --status) action=status ;;
    --rollback) action=rollback ;;
    --no-build) build=no ;;
    --no-monitoring) monitoring=no ;;
    --replicas) replicas=yes ;;
    --apply-gpu-settings) apply_gpu=yes ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
done
[[ $action != status ]] || mode=status

deploy() {
  check_host
  # Exported variables override .env, so keep what the environment or .env sets.
  export OWL_CUDA=${setting[OWL_CUDA]:-$cuda}
  export OWL_REVISION=${setting[OWL_REVISION]:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
  pin_images
  remember_old
  gpu_settings
  [[ $build == no ]] || build
  check_image
  make_secrets
  [[ $mode == dry-run || ${OWL_DEPLOY_MEASURE:-yes} == no ]] || show_figures
  if [[ $mode == dry-run ]]; then
    start
    say "dry run: the host meets all requirements; nothing was changed."
    return
  fi
  { start && wait_until_ready "${own_services[@]}"; } || give_up
  prove
}

umask 077
read_settings
trap 'interrupted 2' INT
trap 'interrupted 15' TERM
trap 'interrupted 1' HUP

[[ $mode != deploy ]] || take_lock
case $action in
  status) check_docker; show_status ;;
  rollback) check_docker; check_nvidia_runtime; check_gpu; check_settings; rollback ;;
  *) deploy ;;
esac

# shellcheck shell=bash
# Sourced by scripts/check and the tests of monitoring: Prometheus and promtool, from Debian's package `prometheus`.
#
#   prometheus_bin NAME  path of prometheus or promtool: on PATH, or unpacked in .venv/tools; fails when it is nowhere
#   ensure_prometheus    unpack Debian's package there unless one of both is found already. Needs apt-get and dpkg, no root

prometheus_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
prometheus_home="$prometheus_root/.venv/tools/prometheus"

prometheus_bin() {
  if [[ -x "$prometheus_home/usr/bin/$1" ]]; then
    printf '%s\n' "$prometheus_home/usr/bin/$1"
  else
    command -v "$1"
  fi
}

prometheus_there() { prometheus_bin promtool >/dev/null && prometheus_bin prometheus >/dev/null; }

# Into $1: what `apt-get download` finds in the lists of this machine, else in lists fetched for this purpose.
prometheus_download() {
  local folder=$1 own
  (cd "$folder" && apt-get -qq download prometheus) 2>"$folder/why" && return 0
  mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
  own=(-o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder/cache" -o "APT::Sandbox::User=")
  (cd "$folder" && apt-get -qq "${own[@]}" update && apt-get -qq "${own[@]}" download prometheus) 2>"$folder/why"
}

ensure_prometheus() {
  local folder
  prometheus_there && return 0
  if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    echo "Prometheus is not here, and neither is apt-get to fetch it: install Debian's package prometheus" >&2
    return 1
  fi
  mkdir -p "${prometheus_home%/*}" && rm -rf "$prometheus_home" || return 1
  folder=$(mktemp -d "${prometheus_home%/*}/fetching.XXXXXX") || return 1
  # Unpacked beside it and moved: an interrupted run leaves nothing that looks whole.
  if prometheus_download "$folder" && dpkg -x "$folder"/prometheus_*.deb "$folder/unpacked"; then
    mv -T "$folder/unpacked" "$prometheus_home" || true # another run was faster
  else
    cat "$folder/why" >&2
  fi
  rm -rf "$folder"
  prometheus_there
}

#!/usr/bin/env bash
# What the GPUs are doing, from nvidia-smi: temperature, load, memory, power, clock, and why the clock is held back.
# Reads only; changes no setting. In the container it is /app/monitor_gpu.sh.
set -uo pipefail

usage() {
  cat <<'USAGE'
usage: monitor_gpu.sh [--once] [--json] [--interval SECONDS]
  --once       one reading, then exit (0 also where there is no GPU)
  --json       one JSON object per reading: {"time","gpus":[...],"reason"}
  --interval   seconds between readings (default 5)
Power capping is normal on a T4 (70 W) under load; thermal slowdown is not.
USAGE
}

once=no
json=no
interval=5
while [[ $# -gt 0 ]]; do
  case $1 in
    --once) once=yes ;;
    --json) json=yes ;;
    --interval)
      interval=${2:-}
      shift
      ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
  [[ $# -gt 0 ]] && shift
done
if ! [[ $interval =~ ^[0-9]+(\.[0-9]+)?$ ]]; then
  echo "--interval takes a number of seconds, not '$interval'" >&2
  exit 2
fi

readonly fields=index,name,driver_version,temperature.gpu,utilization.gpu,memory.used,memory.total,power.draw,power.limit,clocks.sm

# Drivers before R535 know the last field by its old name only.
read_gpus() {
  local reasons
  for reasons in clocks_event_reasons.active clocks_throttle_reasons.active; do
    nvidia-smi --query-gpu="$fields,$reasons" --format=csv,noheader,nounits 2>/dev/null && return 0
  done
  return 1
}

# Bits of NVML's nvmlClocksEventReason*.
reason_words() {
  [[ $1 =~ ^0x[0-9A-Fa-f]+$ ]] || { printf 'unknown'; return; }
  local -i bits=$1
  local words=""
  ((bits & 0x1)) && words+=" idle"
  ((bits & 0x4)) && words+=" power-cap"
  ((bits & 0x8)) && words+=" hardware-slowdown"
  ((bits & 0x20)) && words+=" THERMAL-software"
  ((bits & 0x40)) && words+=" THERMAL-hardware"
  ((bits & 0x80)) && words+=" power-brake"
  printf '%s' "${words:- none}" | sed 's/^ //'
}

json_string() { printf '"%s"' "$(printf '%s' "$1" | sed 's/\\/\\\\/g; s/"/\\"/g')"; }

# nvidia-smi says [N/A] or [Not Supported] where a card has no such sensor.
json_number() { if [[ $1 =~ ^-?[0-9]+(\.[0-9]+)?$ ]]; then printf '%s' "$1"; else printf null; fi; }

json_gpu() {
  printf '{"index":%s,"name":%s,"driver":%s,' "$(json_number "$1")" "$(json_string "$2")" "$(json_string "$3")"
  printf '"temperature_c":%s,"utilization_percent":%s,' "$(json_number "$4")" "$(json_number "$5")"
  printf '"memory_used_mib":%s,"memory_total_mib":%s,' "$(json_number "$6")" "$(json_number "$7")"
  printf '"power_w":%s,"power_limit_w":%s,"sm_clock_mhz":%s,' "$(json_number "$8")" "$(json_number "$9")" "$(json_number "${10}")"
  printf '"clock_limits":%s}' "$(json_string "$(reason_words "${11}")")"
}

text_gpu() {
  printf 'GPU %s %s (driver %s)  %s C  load %s %%  memory %s/%s MiB  power %s/%s W  %s MHz  clock held by: %s\n' \
    "${@:1:10}" "$(reason_words "${11}")"
}

# print_gpus FORMAT: csv lines from stdin, one GPU each
print_gpus() {
  local line separator="" values
  while IFS= read -r line; do
    IFS=, read -ra values <<<"${line//, /,}"
    [[ ${#values[@]} -eq 11 ]] || continue
    if [[ $json == yes ]]; then
      printf '%s' "$separator"
      json_gpu "${values[@]}"
      separator=,
    else
      text_gpu "${values[@]}"
    fi
  done
}

why_none() {
  if command -v nvidia-smi >/dev/null 2>&1; then
    echo "nvidia-smi is here but reports no GPU: is the driver loaded, and is the GPU passed to this container?"
  else
    echo "No GPU to watch: nvidia-smi was not found, so there is no NVIDIA driver on this machine."
  fi
}

reading() {
  local now gpus reason=""
  now=$(date -u +%Y-%m-%dT%H:%M:%SZ)
  gpus=$(read_gpus) || gpus=""
  [[ -n $gpus ]] || reason=$(why_none)
  if [[ $json == yes ]]; then
    printf '{"time":"%s","gpus":[%s],"reason":%s}\n' "$now" "$(print_gpus <<<"$gpus")" \
      "$(if [[ -n $reason ]]; then json_string "$reason"; else printf null; fi)"
  elif [[ -n $reason ]]; then
    printf '%s\n' "$reason"
  else
    printf '%s\n' "$now"
    print_gpus <<<"$gpus"
  fi
  [[ -z $reason ]]
}

if [[ $once == yes ]]; then
  reading || true
  exit 0
fi
while reading; do sleep "$interval"; done
exit 1

#!/usr/bin/env bash
# What the GPUs are doing, from nvidia-smi: load, memory, temperature, power, clocks and what holds them back, PCIe,
# memory errors, processes. Needs bash and nvidia-smi, nothing else. Reads only; changes no setting.
# In the container it is /app/monitor_gpu.sh.
set -uo pipefail

usage() {
  cat <<'USAGE'
usage: monitor_gpu.sh [--once] [--json] [--interval SECONDS]
  --once       one reading, then exit (0 also where there is no GPU)
  --json       one JSON object per reading, as GET /v1/gpu answers, and "time"
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
if ! [[ $interval =~ ^[0-9]+(\.[0-9]+)?$ && $interval =~ [1-9] ]]; then
  echo "--interval takes a number of seconds above 0, not '$interval'" >&2
  exit 2
fi

readonly within=10
readonly note="utilisation is the share of time in which any kernel ran, not what the tensor cores did: their activity comes only from DCGM (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE, compute capability 7.0 and up), not from NVML"

# Name in GET /v1/gpu, name for nvidia-smi --query-gpu, kind of value.
readonly fields=(
  "index index number"
  "name name text"
  "uuid uuid text"
  "compute_capability compute_cap text"
  "driver_version driver_version text"
  "memory_total_bytes memory.total mebibytes"
  "memory_used_bytes memory.used mebibytes"
  "utilization_percent utilization.gpu number"
  "memory_utilization_percent utilization.memory number"
  "temperature_celsius temperature.gpu number"
  "power_watts power.draw number"
  "power_limit_watts enforced.power.limit number"
  "sm_clock_mhz clocks.current.sm number"
  "sm_clock_max_mhz clocks.max.sm number"
  "pcie_generation pcie.link.gen.current number"
  "pcie_generation_max pcie.link.gen.max number"
  "pcie_width pcie.link.width.current number"
  "ecc_uncorrected_errors ecc.errors.uncorrected.volatile.total number"
  "retired_pages_pending retired_pages.pending flag"
  "held_by clocks_event_reasons.active text"
)
# In this order they are written; what is not among the fields comes from elsewhere, or nvidia-smi does not tell it.
readonly written=(
  index name uuid memory_total_bytes memory_used_bytes utilization_percent temperature_celsius power_watts
  power_limit_watts sm_clock_mhz memory_utilization_percent compute_capability temperature_slowdown_celsius
  sm_clock_max_mhz pcie_generation pcie_generation_max pcie_width pcie_sent_bytes_per_second
  pcie_received_bytes_per_second throttle throttled_abnormally ecc_uncorrected_errors retired_pages_pending
  remapped_rows_pending processes reason
)
# Bits of NVML's nvmlClocksEventReasons: bit, name, normal, words. Heat and the power supply are not normal.
readonly reasons=(
  "0x1 gpu_idle true nothing runs, so the clock rests"
  "0x2 applications_clocks_setting true held at the clock that somebody has set"
  "0x4 sw_power_cap true held by the power limit, as usual under load; a T4 nearly always is"
  "0x8 hw_slowdown false the hardware has at least halved the clock: heat or power supply"
  "0x10 sync_boost true held to the clock of the other cards of its group"
  "0x20 sw_thermal_slowdown false too hot: the driver lowers the clock"
  "0x40 hw_thermal_slowdown false far too hot: the hardware has at least halved the clock"
  "0x80 hw_power_brake_slowdown false the power supply asks for less, and the clock is at least halved"
  "0x100 display_clock_setting true held by what its displays need"
  "0x200 board_limit true held by a limit of the board"
  "0x400 reliability true at the highest voltage that it may have"
)

# ------------------------------------------------------------------------------------------------- asking nvidia-smi

# smi ARGUMENTS: sets `said` to what it printed. Bounded where `timeout` is here (a dead card may hang for ever).
smi() {
  if command -v timeout >/dev/null 2>&1; then
    said=$(timeout "$within" nvidia-smi "$@" 2>&1)
  else
    said=$(nvidia-smi "$@" 2>&1)
  fi
}

asked=()
for field in "${fields[@]}"; do
  read -r _ theirs _ <<<"$field"
  asked+=("$theirs")
done

# Sets `gpus`, a line of values for each card. An nvidia-smi that does not know a field refuses the whole question and
# names the field: it is asked by its older name, or no more.
read_gpus() {
  local left IFS=,
  while [[ ${#asked[@]} -gt 0 ]]; do
    smi --query-gpu="${asked[*]}" --format=csv,noheader,nounits
    status=$?
    gpus=$said
    [[ $status -eq 0 ]] && return 0
    [[ $said =~ Field\ \"([^\"]+)\"\ is\ not\ a\ valid ]] || return 1
    left=()
    for theirs in "${asked[@]}"; do
      case $theirs in
        "${BASH_REMATCH[1]}") [[ $theirs == clocks_event_reasons.active ]] && left+=(clocks_throttle_reasons.active) ;;
        *) left+=("$theirs") ;;
      esac
    done
    [[ ${left[*]} != "${asked[*]}" ]] || return 1
    asked=("${left[@]}")
  done
  return 1
}

declare -A sent=() received=() pending=() processes=() running=()
counted=no

# MB/s by the number of the card. The columns of dmon differ between drivers, so they are found by their headings.
read_throughput() {
  local line place rx tx
  local -a words
  sent=() received=() rx="" tx=""
  smi dmon -s t -c 1 || return 0
  while IFS= read -r line; do
    read -ra words <<<"${line#\#}"
    if [[ $line == \#*rxpci* ]]; then
      for place in "${!words[@]}"; do
        case ${words[place]} in rxpci) rx=$place ;; txpci) tx=$place ;; esac
      done
    elif [[ $line != \#* && -n $rx && -n $tx && ${#words[@]} -gt $rx && ${#words[@]} -gt $tx ]]; then
      received[${words[0]}]=${words[rx]}
      sent[${words[0]}]=${words[tx]}
    fi
  done <<<"$said"
}

# By the card's UUID: whether rows of memory wait to be replaced (Ampere and later).
read_remapped() {
  local uuid waiting _
  pending=()
  smi --query-remapped-rows=gpu_uuid,remapped_rows.pending --format=csv,noheader,nounits || return 0
  while IFS=', ' read -r uuid waiting _; do
    case $waiting in 0 | No) pending[$uuid]=false ;; 1 | Yes) pending[$uuid]=true ;; esac
  done <<<"$said"
}

# By the card's UUID: which processes compute on it, and their memory; no names, no command lines.
read_processes() {
  local uuid pid memory
  processes=() counted=no running=()
  smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv,noheader,nounits || return 0
  counted=yes
  while IFS=', ' read -r uuid pid memory; do
    [[ $pid =~ ^[0-9]+$ ]] || continue
    processes[$uuid]+="${processes[$uuid]+,}{\"pid\":$pid,\"memory_bytes\":$(json_value mebibytes "$memory")}"
    running[$uuid]+="${running[$uuid]+, }$pid ($memory MiB)"
  done <<<"$said"
}

# The newest CUDA of the driver stands in nvidia-smi's own table only. It does not change, so it is asked once.
cuda_version=""
read_cuda() {
  [[ -z $cuda_version ]] || return 0
  smi
  [[ $said =~ CUDA[A-Za-z\ ]*Version\ *:\ *([0-9]+\.[0-9]+) ]] && cuda_version=${BASH_REMATCH[1]}
}

# ------------------------------------------------------------------------------------------------------------ writing

json_string() {
  local text=${1//\\/\\\\}
  text=${text//\"/\\\"}
  printf '"%s"' "${text//[[:cntrl:]]/ }"
}

# json_value KIND TEXT. nvidia-smi says [N/A] or [Not Supported] where a card has no such sensor.
json_value() {
  case $1 in
    text) if [[ -z $2 || $2 == \[* ]]; then printf null; else json_string "$2"; fi ;;
    number) if [[ $2 =~ ^-?[0-9]+(\.[0-9]+)?$ ]]; then printf '%s' "$2"; else printf null; fi ;;
    mebibytes) if [[ $2 =~ ^[0-9]+$ ]]; then printf '%s' $(($2 * 1048576)); else printf null; fi ;;
    megabytes) if [[ $2 =~ ^[0-9]+$ ]]; then printf '%s' $(($2 * 1000000)); else printf null; fi ;;
    flag) case $2 in Enabled | Yes) printf true ;; Disabled | No) printf false ;; *) printf null ;; esac ;;
  esac
}

# What holds the clock back: sets throttle, throttled_abnormally in `out`, and `clock` for people.
explain() {
  local each bit name normal words separator="" all="" abnormal=false
  clock=""
  [[ $1 =~ ^0x[0-9A-Fa-f]+$ ]] || return 0
  local -i bits=$1 known=0
  for each in "${reasons[@]}" ""; do
    if [[ -n $each ]]; then
      read -r bit name normal words <<<"$each"
      known=$((known | bit))
      ((bits & bit)) || continue
    else
      ((bits & ~known)) || continue
      printf -v name 'unknown_0x%x' $((bits & ~known))
      normal=null words="a reason that this version does not know"
    fi
    all+="$separator{\"reason\":\"$name\",\"words\":\"$words\",\"normal\":$normal}"
    clock+="${separator:+; }$([[ $normal == false ]] && echo 'NOT NORMAL: ')$words"
    separator=,
    [[ $normal == false ]] && abnormal=true
  done
  out[throttle]="[$all]" out[throttled_abnormally]=$abnormal
  clock=${clock:-nothing holds it back}
}

# describe LINE: sets `raw` (nvidia-smi's words) and `out` (JSON values) for one card
declare -A raw=() out=()
describe() {
  local -a values
  local -A theirs_says=()
  local place field ours theirs kind
  raw=() out=()
  IFS=, read -ra values <<<"${1//, /,}"
  [[ ${#values[@]} -eq ${#asked[@]} ]] || return 1
  for place in "${!asked[@]}"; do theirs_says[${asked[place]}]=${values[place]}; done
  theirs_says[clocks_event_reasons.active]=${theirs_says[clocks_event_reasons.active]-${theirs_says[clocks_throttle_reasons.active]-}}
  for field in "${fields[@]}"; do
    read -r ours theirs kind <<<"$field"
    raw[$ours]=${theirs_says[$theirs]-}
    out[$ours]=$(json_value "$kind" "${raw[$ours]}")
  done
  explain "${raw[held_by]}"
  local uuid=${raw[uuid]:-none} index=${raw[index]:-none}
  out[pcie_sent_bytes_per_second]=$(json_value megabytes "${sent[$index]-}")
  out[pcie_received_bytes_per_second]=$(json_value megabytes "${received[$index]-}")
  out[remapped_rows_pending]=${pending[$uuid]-null}
  [[ $counted == no ]] || out[processes]="[${processes[$uuid]-}]"
}

json_gpu() {
  local name separator="{"
  for name in "${written[@]}"; do
    printf '%s"%s":%s' "$separator" "$name" "${out[$name]-null}"
    separator=,
  done
  printf '}'
}

text_gpu() {
  local uuid=${raw[uuid]:-none} index=${raw[index]:-none}
  printf 'GPU %s %s: %s C, load %s %%, memory %s of %s MiB, power %s of %s W, clock %s of %s MHz' \
    "$index" "${raw[name]}" "${raw[temperature_celsius]}" "${raw[utilization_percent]}" "${raw[memory_used_bytes]}" \
    "${raw[memory_total_bytes]}" "${raw[power_watts]}" "${raw[power_limit_watts]}" "${raw[sm_clock_mhz]}" \
    "${raw[sm_clock_max_mhz]}"
  printf ', PCIe %s x%s' "${raw[pcie_generation]}" "${raw[pcie_width]}"
  [[ -n ${sent[$index]-} ]] && printf ' (sent %s, received %s MB/s)' "${sent[$index]}" "${received[$index]}"
  printf '\n  clock: %s\n' "${clock:-not told}"
  printf '  processes: %s\n' "${running[$uuid]-none}"
}

why_none() {
  local line=${gpus%%$'\n'*}
  if ! command -v nvidia-smi >/dev/null 2>&1; then
    echo "No GPU to watch: nvidia-smi was not found, so there is no NVIDIA driver on this machine."
  elif [[ $status -eq 124 ]]; then
    echo "No GPU to watch: nvidia-smi has not answered within $within s; see dmesg."
  else
    echo "No GPU to watch: nvidia-smi is here but reports none (${line:-it says nothing}): is the driver loaded, and is the GPU passed to this container?"
  fi
}

reading() {
  local now line cards="" reason=""
  gpus="" status=0
  TZ=UTC0 printf -v now '%(%Y-%m-%dT%H:%M:%SZ)T' -1
  if read_gpus && [[ -n $gpus ]]; then
    read_throughput
    read_remapped
    read_processes
    read_cuda
  else
    reason=$(why_none)
    gpus=""
  fi
  [[ $json == yes ]] || printf '%s\n' "${reason:-$now}"
  while IFS= read -r line; do
    describe "$line" || continue
    if [[ $json == yes ]]; then cards+="${cards:+,}$(json_gpu)"; else text_gpu; fi
  done <<<"$gpus"
  if [[ $json == yes ]]; then
    printf '{"time":"%s","devices":[%s],"driver_version":%s,"cuda_version":%s,"reason":%s,"note":%s,"answered":%s}\n' \
      "$now" "$cards" "${out[driver_version]-null}" "$(json_value text "$cuda_version")" \
      "$(json_value text "$reason")" "$(json_string "$note")" "$([[ $status -eq 124 ]] && echo false || echo true)"
  fi
  [[ -z $reason ]]
}

if [[ $once == yes ]]; then
  reading || true
  exit 0
fi
# `read` waits without the command `sleep`: nothing ever comes from that pipe.
while reading; do read -rt "$interval" <> <(:) || true; done
exit 1

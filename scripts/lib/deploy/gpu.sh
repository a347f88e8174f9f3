# shellcheck shell=bash
# Sourced by deploy_t4_optimized.sh: the card's own settings. Read-only without --apply-gpu-settings; with it, each old
# value is read, the change said, made, looked at again, and the command that undoes it printed and kept. What a card, a
# driver or a cloud refuses is said and never ends the deployment.
#   OWL_GPU_POWER_LIMIT  watts, from the card's minimum to its default and never above
#   OWL_GPU_CLOCKS       "900,1000" locks the clock between these (MHz), for benchmarks that can be repeated
# Not set, with reason (docs/deployment.md): application clocks (deprecated), compute mode EXCLUSIVE_PROCESS (api and
# worker share the card).
# shellcheck disable=SC2154  # names of base.sh and of the script itself

gpu_index=0

# gpu_value FIELD: of our card, without its unit; empty if the driver does not tell
gpu_value() {
  local value
  value=$(nvidia-smi -i "$gpu_index" --query-gpu="$1" --format=csv,noheader,nounits 2>/dev/null | head -n 1)
  [[ $value != *N/A* && $value != *"not a valid"* && $value != *"Not Supported"* ]] || value=""
  printf '%s' "$value"
}

# gpu_command ARGUMENTS...: as root, if that is to be had without asking
gpu_command() {
  if [[ $EUID -eq 0 ]] || ! command -v sudo >/dev/null 2>&1; then
    "$@" 2>&1
  else
    sudo -n "$@" 2>&1
  fi
}

# keep_undo COMMAND: the newest first, so that run from the top the oldest value is what remains
keep_undo() {
  local file=$state/gpu-undo.sh before=""
  say "  undo: $1"
  [[ ! -f $file ]] || before=$(grep -v '^#' "$file")
  printf '%s\n' "#!/bin/sh" "# Puts the card's settings back as they were before ./deploy_t4_optimized.sh --apply-gpu-settings." \
    "$1" ${before:+"$before"} >"$file.new" && mv "$file.new" "$file" && chmod 700 "$file"
}

# change WHAT FIELD OLD NEW UNDO COMMAND...: FIELD "" where the driver has none to look at afterwards
change() {
  local what=$1 field=$2 old=$3 new=$4 undo=$5 answer now
  shift 5
  say "  $what: ${old:-unknown} -> $new"
  say "+ $*"
  [[ $mode != dry-run ]] || return 0
  if ! answer=$(gpu_command "$@"); then
    answer=${answer//$'\n'/ }
    note "$what was refused and stays as it was (${answer:0:160}). It needs root, and many clouds and virtual cards do not allow it."
    return 0
  fi
  keep_undo "$undo"
  [[ -n $field ]] || return 0
  now=$(gpu_value "$field")
  [[ $now == "$new" || ${now%.*} == "${new%.*}" ]] || note "$what: the card says ${now:-nothing} after the change, not $new."
}

# By its daemon, unless that runs already: distributions start it without the mode (Ubuntu: --no-persistence-mode), and
# then, as without a daemon, nvidia-smi asks for it.
apply_persistence() {
  local old daemon=no
  old=$(gpu_value persistence_mode)
  if [[ $old == Enabled ]]; then
    say "  persistence: Enabled already"
  elif [[ -z $old ]]; then
    note "the driver does not tell the persistence mode; it is left alone."
  else
    if systemctl cat nvidia-persistenced >/dev/null 2>&1 && ! systemctl is-active --quiet nvidia-persistenced; then
      daemon=yes
      change persistence "" "$old" "by its daemon" "sudo systemctl disable --now nvidia-persistenced" \
        systemctl enable --now nvidia-persistenced
    fi
    [[ $daemon == yes && ($mode == dry-run || $(gpu_value persistence_mode) == Enabled) ]] ||
      change persistence persistence_mode "$old" Enabled "sudo nvidia-smi -i $gpu_index -pm 0" nvidia-smi -i "$gpu_index" -pm 1
  fi
}

# above A B: is A greater, to hundredths of a watt?
above() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a > b + 0.005) }'; }

apply_power() {
  local want=${OWL_GPU_POWER_LIMIT:-} old low usual
  old=$(gpu_value power.limit) low=$(gpu_value power.min_limit) usual=$(gpu_value power.default_limit)
  if [[ -z $want ]]; then
    say "  power limit: ${old:-unknown} W (default ${usual:-unknown} W), left as it is; OWL_GPU_POWER_LIMIT lowers it"
  elif ! [[ $want =~ ^[0-9]+(\.[0-9]+)?$ ]]; then
    note "OWL_GPU_POWER_LIMIT is no number of watts; the power limit stays as it is."
  elif [[ -z $old || -z $low || -z $usual ]]; then
    note "the driver does not tell the power limits; they are left alone."
  elif above "$want" "$usual" || above "$low" "$want"; then
    note "OWL_GPU_POWER_LIMIT lies outside $low to $usual W (the card's minimum and default); the power limit stays as it is."
  elif ! above "$want" "$old" && ! above "$old" "$want"; then
    say "  power limit: $old W already"
  else
    change "power limit (W)" power.limit "$old" "$want" "sudo nvidia-smi -i $gpu_index -pl $old" nvidia-smi -i "$gpu_index" -pl "$want"
  fi
}

apply_clocks() {
  local want=${OWL_GPU_CLOCKS:-} most
  most=$(gpu_value clocks.max.sm)
  if [[ -z $want ]]; then
    say "  clocks: left to the card; OWL_GPU_CLOCKS=900,1000 locks them for benchmarks"
  elif ! [[ $want =~ ^([0-9]{2,5}),([0-9]{2,5})$ ]] || ((10#${BASH_REMATCH[1]} > 10#${BASH_REMATCH[2]})); then
    note "OWL_GPU_CLOCKS is no pair of MHz such as 900,1000; the clocks stay as they are."
  elif [[ -n $most ]] && ((10#${BASH_REMATCH[2]} > most)); then
    note "OWL_GPU_CLOCKS goes beyond the card's $most MHz; the clocks stay as they are."
  else
    change clocks "" "not locked, or as an earlier run left them" "$want MHz" "sudo nvidia-smi -i $gpu_index -rgc" \
      nvidia-smi -i "$gpu_index" -lgc "$want"
  fi
}

show_gpu_settings() {
  local told persistence limit usual clock most
  told=$(gpu_value persistence_mode,power.limit,power.default_limit,clocks.current.sm,clocks.max.sm)
  IFS=, read -r persistence limit usual clock most <<<"${told// /}"
  [[ -n $most ]] || return 0 # a driver that does not tell all of it
  say "GPU settings: persistence $persistence, power limit $limit W (default $usual W), SM clock $clock of $most MHz; left as they are (--apply-gpu-settings)"
}

gpu_settings() {
  gpu_index=${setting[GPU_DEVICE_ID]}
  if [[ $apply_gpu != yes ]]; then
    show_gpu_settings
    return
  fi
  begin "changing settings of the card" "What was changed is undone by: sudo $state/gpu-undo.sh"
  say "GPU settings of card $gpu_index:"
  apply_persistence
  apply_power
  apply_clocks
  [[ ! -f $state/gpu-undo.sh ]] || say "  undo all of it: sudo $state/gpu-undo.sh"
}

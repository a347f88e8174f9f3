# shellcheck shell=bash
# Sourced by deploy_t4_optimized.sh: what shows that it works: figures of the card before the start, a search after it.
# shellcheck disable=SC2154  # names of base.sh and of the script itself

# Measures before the service starts: only one process then computes on the card, in a container with memory of its own.
# A failed measurement never fails a deployment. `timeout` inside ends the container, and the kernel kills all that is left
# in it; ending the docker client would end neither.
readonly measure_seconds=180
show_figures() {
  begin "measuring" "What ran before still runs; nothing was started."
  if nvidia-smi -i "${setting[GPU_DEVICE_ID]}" --query-compute-apps=pid --format=csv,noheader 2>/dev/null | grep -q '^[0-9]'; then
    note "the card is in use, so it was not measured."
    return
  fi
  say "measuring the card ($measure_seconds s at most; OWL_DEPLOY_MEASURE=no leaves it out)"
  # shellcheck disable=SC2016  # the container's own shell
  timeout -k 10 $((measure_seconds + 60)) docker run --rm --gpus "device=${setting[GPU_DEVICE_ID]}" --network none \
    --user "$user_id:$user_id" --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges --memory 6g \
    --init --no-healthcheck --entrypoint timeout "$image" -k 10 "$measure_seconds" sh -c \
    'report=$(python -m app.src.core.t4_gpu_optimizer --json --sizes 1024,4096 --duration 3) && printf "%s" "$report" | python -c "$1"' \
    measure "$(<scripts/lib/deploy/figures.py)" 2>>"$state/deploy.log" ||
    note "the card could not be measured; $state/deploy.log says why."
}

# By the published port, as a client; the key is read in a container from its file, so that no list of processes shows it.
try_search() {
  begin "trying a search" "The service runs and is ready; nothing is lost."
  if ! timeout 120 docker run --rm --network host --user "$user_id:$user_id" --read-only --cap-drop ALL \
    --security-opt no-new-privileges --volume "$PWD/secrets:/run/secrets:ro" --entrypoint python "$image" \
    -c "$(<scripts/lib/deploy/smoke.py)" "$url" /run/secrets/deploy_key ${certificate:+"$certificate"}; then
    record_result "search failed"
    refuse "the service is ready, but the search above failed. It goes on running. Look: docker exec $container python -m app doctor$(way_back)"
  fi
}

# Alerts that nobody hears of are worth a word.
told_to() { [[ ${setting[OWL_ALERTMANAGER_CONFIG]} != ./monitoring/* ]] || printf '   (tells nobody yet: docs/monitoring.md)'; }

show_addresses() {
  say "ready: $url  (each request with a key, /docs and /metrics too)"
  [[ $replicas == no ]] || say "both services at one address: http://127.0.0.1:${setting[OWL_REPLICAS_PORT]}"
  if [[ $monitoring == yes ]]; then
    say "Prometheus: http://127.0.0.1:${setting[OWL_PROMETHEUS_PORT]}   Grafana: http://127.0.0.1:${setting[OWL_GRAFANA_PORT]} (user admin, password: sudo cat secrets/grafana_password)"
    say "Alertmanager: http://127.0.0.1:${setting[OWL_ALERTMANAGER_PORT]}$(told_to)"
  fi
  say "A key for each client: ./scripts/keys create NAME --scope search   Status: ./deploy_t4_optimized.sh --status"
}

# 1 when only the second service is missing
prove() {
  local missing=0
  try_search
  record_result "serves"
  second_is_ready || missing=1
  show_addresses
  return $missing
}

# shellcheck shell=bash
# Sourced by deploy_t4_optimized.sh: what shows that it works once it is ready: figures of the card, and a search.
# shellcheck disable=SC2154  # names of base.sh and of the script itself

# Figures are worth knowing and no reason to call a service that answers a failed one.
show_figures() {
  begin "measuring" "The service runs and is ready; nothing is lost."
  say "measuring the card (a quarter of a minute; OWL_DEPLOY_MEASURE=no leaves it out)"
  # shellcheck disable=SC2016  # the container's own shell
  timeout 180 docker exec "$container" sh -c \
    'python -m app.src.core.t4_gpu_optimizer --json --sizes 1024,4096 --duration 3 2>/dev/null | python -c "$1"' \
    measure "$(<scripts/lib/deploy/figures.py)" ||
    note "the card could not be measured. Try: docker exec $container python -m app.src.core.t4_gpu_optimizer"
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
  if [[ $monitoring == yes ]]; then
    say "Prometheus: http://127.0.0.1:${setting[OWL_PROMETHEUS_PORT]}   Grafana: http://127.0.0.1:${setting[OWL_GRAFANA_PORT]} (user admin, password: sudo cat secrets/grafana_password)"
    say "Alertmanager: http://127.0.0.1:${setting[OWL_ALERTMANAGER_PORT]}$(told_to)"
  fi
  say "A key for each client: ./scripts/keys create NAME --scope search   Status: ./deploy_t4_optimized.sh --status"
}

prove() {
  [[ ${OWL_DEPLOY_MEASURE:-yes} == no ]] || show_figures
  try_search
  record_result "serves"
  show_addresses
}

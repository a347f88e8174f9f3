# shellcheck shell=bash
# Sourced by deploy_t4_optimized.sh: the image, its predecessor, start, readiness, the way back, and the status.
# shellcheck disable=SC2154  # names of base.sh and of the script itself

# These decide whether an image serves. A way back leaves monitoring and the proxy alone: they may not run here, and their
# images are others. The second service follows, but cannot prevent it.
readonly own_services=(api worker)

image_id() { docker image inspect --format '{{.Id}}' "$1" 2>/dev/null; }
running_image() { docker inspect --format '{{.Image}}' "$container" 2>/dev/null; }
image_label() { docker image inspect --format "{{index .Config.Labels \"org.opencontainers.image.$2\"}}" "$1" 2>/dev/null; }
health() { [[ -z $1 ]] || docker inspect --format '{{.State.Status}} {{if .State.Health}}{{.State.Health.Status}}{{end}}' "$1" 2>/dev/null; }

# What people call an image.
described() {
  local version revision
  version=$(image_label "$1" version)
  revision=$(image_label "$1" revision)
  printf '%s' "${version:+$version, }commit ${revision:-unknown}"
}

# The digests that scripts/pin-images wrote; what the environment or .env names wins.
pin_images() {
  local name value
  while IFS='=' read -r name value; do
    [[ -n ${!name:-} ]] || env_has "$name" || export "$name=$value"
  done < <(grep -E '^OWL_[A-Z]+_IMAGE=' deployment/images.env 2>/dev/null)
}

tag() { docker tag "$1" "$2" || refuse "the image could not be tagged as $2; the message above says why."; }

# What served before this run, and whether it served well: the way back leads there.
old_image="" old_was_healthy=no earlier_image=""
prometheus_ran=""
remember_old() {
  [[ $monitoring == no ]] || prometheus_ran=$("${compose[@]}" ps -q prometheus 2>/dev/null | head -n 1)
  earlier_image=$(image_id "$previous_image")
  old_image=$(running_image)
  [[ $(health "$container") == "running healthy" ]] && old_was_healthy=yes
  [[ -n $old_image ]] || old_image=$(image_id "$image")
}

build() {
  begin "building the image" "What ran before still runs; nothing else was changed."
  say "torch for this driver: CUDA $OWL_CUDA"
  # Docker's own note on each build holds its time: with the containerd image store every build would be another image,
  # a second run would restart what is unchanged, and lose the way back.
  export BUILDX_NO_DEFAULT_ATTESTATIONS=1
  step "the image could not be built; the message above says why. What runs now was left as it is." "${compose[@]}" build
  [[ $mode != dry-run ]] || return 0
  # After the build, for only then it is known whether there is anything new: a second run must not lose the way back.
  if [[ -n $old_image && $old_image != "$(image_id "$image")" ]]; then
    tag "$old_image" "$previous_image"
    say "The image before this one is kept as $previous_image."
  fi
}

check_image() {
  [[ $mode == dry-run || -n $(image_id "$image") ]] ||
    refuse "there is no image $image. Build it (without --no-build), or load it: docker load -i FILE"
  step "a container cannot see the GPU. Try: docker run --rm --gpus all ubuntu nvidia-smi" \
    docker run --rm --gpus all --network none --entrypoint nvidia-smi "$image" -L
  # Once, without a card: api and worker start together, and then find the libraries in memory instead of on a slow disk.
  step "torch could not be loaded from the image within 10 minutes; the message above says why. What runs now was left as it is." \
    docker run --rm --network none --user "$user_id:$user_id" --read-only --cap-drop ALL --no-healthcheck \
    --entrypoint timeout "$image" -k 10 600 python -c "import torch"
}

# sum FILE...: of what stands in them. Compose looks at the file's name alone, and what a container has read at its start
# it does not read again: a label with the sum has it replaced when the file is another one. What only the container may
# read goes by its size and age.
sum() { { cat "$@" || find -L "$@" -printf '%s %T@\n'; } 2>/dev/null | cksum | tr ' ' '-'; }

export_sums() {
  OWL_SUM_SERVICE=$(sum owl-sap.toml)
  OWL_SUM_PROXY=$(sum deployment/nginx/replicas.conf)
  OWL_SUM_DCGM=$(sum monitoring/dcgm/counters.csv)
  OWL_SUM_PROMETHEUS=$(sum monitoring/prometheus/prometheus.yml monitoring/prometheus/rules/*.yml)
  OWL_SUM_ALERTMANAGER=$(sum "${setting[OWL_ALERTMANAGER_CONFIG]}")
  OWL_SUM_GRAFANA=$(sum monitoring/grafana/provisioning/*/*.yml)
  export OWL_SUM_SERVICE OWL_SUM_PROXY OWL_SUM_DCGM OWL_SUM_PROMETHEUS OWL_SUM_ALERTMANAGER OWL_SUM_GRAFANA
}

# The worker reads, renders and tokenises on processors: all but two, which the API has, and at least two.
worker_processors() {
  local count
  count=$(docker info --format '{{.NCPU}}' 2>/dev/null)
  if [[ $count =~ ^[0-9]+$ && $count -gt 4 ]]; then printf '%s' $((count - 2)); else printf 2; fi
}

# bring_up [ARGUMENT...]: by compose, which replaces what changed, and only that
bring_up() { step "the containers could not be started; the message above says why." "${compose[@]}" up -d --no-build "$@"; }

# start [SERVICE...]: these, or all; 1 when the one that is replaced first does not become ready
start() {
  local before
  export_sums
  export OWL_WORKER_CPUS=${setting[OWL_WORKER_CPUS]:-$(worker_processors)}
  begin "starting the containers" "Some may run already. Deploy again, or go back: ./deploy_t4_optimized.sh --rollback"
  # Start the second service first: the proxy sends every request to the other one until it is ready. But start the first one
  # first if it is not healthy. A second service that was not healthy before says nothing about the image.
  if [[ $replica_ran == yes && $(health "$container") == "running healthy" ]]; then
    before=$(health "$(container_of replica)")
    bring_up --no-deps replica
    wait_until_ready replica || [[ $before != "running healthy" ]] || return 1
  elif [[ $replica_ran == yes ]]; then
    bring_up "${own_services[@]}"
    wait_until_ready "${own_services[@]}" || return 1
  fi
  bring_up "$@"
  # It sees one file, not the folder, and a file that was replaced only after a restart.
  [[ $new_secrets != *metrics_token* || -z $prometheus_ran ]] ||
    step "Prometheus could not be restarted; the message above says why." "${compose[@]}" restart prometheus
}

# ready SERVICE...: 0 when all are healthy, 1 while one is not yet, 2 when one will not be; `standing` says which and how
standing=""
ready() {
  local service name state_now all=0
  for service in "$@"; do
    name=$(container_of "$service")
    state_now=$(health "$name")
    case $state_now in
      "running healthy" | "running ") ;;
      "" | exited* | dead* | restarting* | *unhealthy) standing="${name:-$service}: ${state_now:-no such container}"; return 2 ;;
      *) standing="${name}: $state_now"; all=1 ;;
    esac
  done
  return $all
}

# wait_until_ready SERVICE...: 1 when the time is over or something ended. The last lines of the log then go to stderr. In a
# dry run there is nothing to wait for.
wait_until_ready() {
  local limit=${OWL_DEPLOY_WAIT:-420} answer=1 names="$*"
  [[ $mode != dry-run ]] || return 0
  begin "waiting until the service is ready" "Containers run. Look: --status; deploy again; or go back: --rollback"
  say "waiting for ${names// / and } (at most $limit s)"
  SECONDS=0
  while [[ $SECONDS -le $limit ]]; do
    ready "$@" && return 0
    answer=$?
    [[ $answer -eq 1 ]] || break
    sleep "${OWL_DEPLOY_POLL:-2}"
  done
  docker logs --tail 20 "${standing%%:*}" >&2 2>&1
  return 1
}

# 0 when there is no second service, or it and the proxy are ready
second_is_ready() {
  [[ $replicas == no ]] || wait_until_ready replica proxy ||
    { warn "the first service is ready, but not the second one or its proxy ($standing). Look: ./deploy_t4_optimized.sh --status"; return 1; }
}

# Start what runs our image with the image that the tag names now; 1 when api or worker does not become ready. A second
# service that does not start or become ready is only reported: `refuse` ends no more than the shell in parentheses.
go_back() {
  start "${own_services[@]}" && wait_until_ready "${own_services[@]}" || return 1
  [[ $replicas == no ]] || { (bring_up --no-deps replica) && second_is_ready; }
  return 0
}

# What to add to a message where there is an image to go back to.
way_back() {
  local before
  before=$(image_id "$previous_image")
  [[ -z $before || $before == "$(image_id "$image")" ]] || printf '; or go back: ./deploy_t4_optimized.sh --rollback'
}

# The new image does not serve: back to what served before, if it did and is another. Ends the run in any case.
give_up() {
  local reason="the service did not become ready ($standing); its last lines stand above"
  record_result "not ready"
  [[ $old_was_healthy == yes && -n $old_image && $old_image != "$(image_id "$image")" ]] ||
    refuse "$reason. More: docker logs ${standing%%:*}$(way_back)"
  warn "$reason. Going back to the image that served before; the new one is kept as $failed_image."
  begin "going back to the image before" "Go on with: ./deploy_t4_optimized.sh --rollback"
  docker logs "${standing%%:*}" >"$state/failed.log" 2>&1
  tag "$image" "$failed_image"
  tag "$old_image" "$image"
  # The image before the one that serves again, as it was before this run.
  if [[ -n $earlier_image ]]; then tag "$earlier_image" "$previous_image"; else docker rmi "$previous_image" >/dev/null 2>&1; fi
  replica_ran=no   # the image served before, so the second service need not try it first
  go_back ||
    refuse "the image that served before does not become ready either ($standing): look at HANA, .env and owl-sap.toml rather than at the image."
  record_result "went back"
  refuse "the new image does not become ready; the one before it serves again. What the new one said is in $state/failed.log."
}

rollback() {
  local now before
  before=$(image_id "$previous_image")
  now=$(image_id "$image")
  [[ -n $before ]] || refuse "there is no image $previous_image to go back to; one is kept when a build replaces another."
  [[ $before != "$now" ]] || refuse "$previous_image is the image that is deployed; there is nothing to go back to."
  begin "going back to the image before" "Look: --status; run --rollback again only if the tags were not swapped yet."
  step "the image could not be tagged; the message above says why." docker tag "$before" "$image"
  # Swapped, so that a second --rollback comes back here.
  [[ -z $now ]] || step "the image could not be tagged; the message above says why." docker tag "$now" "$previous_image"
  if [[ $mode == dry-run ]]; then
    go_back
    return
  fi
  if ! go_back; then
    record_result "rolled back, not ready"
    refuse "the image before does not become ready ($standing); its last lines stand above. Forward again: ./deploy_t4_optimized.sh --rollback"
  fi
  record_result "rolled back"
  say "The image before serves: $(described "$image")"
}

# record_result WORD: for --status
record_result() {
  {
    TZ=UTC printf 'when=%(%Y-%m-%dT%H:%M:%SZ)T\n' -1
    printf 'result=%s\nimage=%s\nversion=%s\ncommit=%s\n' "$1" "$(image_id "$image")" "$(image_label "$image" version)" "$(image_label "$image" revision)"
  } >"$state/last.new" && mv "$state/last.new" "$state/last"
}

show_status() {
  local state_now service other all=0
  state_now=$(health "$container")
  [[ -n $state_now ]] || refuse "there is no container $container. Deploy it: ./deploy_t4_optimized.sh"
  [[ $state_now == "running healthy" ]] || all=1
  say "$container: $state_now, $url"
  if [[ $replicas == yes ]]; then
    for service in replica proxy; do
      other=$(health "$(container_of "$service")")
      [[ $other == "running healthy" ]] || all=1
      say "$service: ${other:-no such container}"
    done
    say "both services: http://127.0.0.1:${setting[OWL_REPLICAS_PORT]}"
  fi
  say "image: $(described "$image"); to go back to: $(image_id "$previous_image" | grep . || echo nothing)"
  [[ ! -f $state/last ]] || say "last deployment: $(tr '\n' ' ' <"$state/last")"
  if [[ -f $state/lock ]] && command -v flock >/dev/null 2>&1 && ! (exec 9<"$state/lock" && flock -n 9); then
    say "a deployment is going on"
  fi
  "${compose[@]}" ps
  ./scripts/monitor_gpu.sh --once
  return $all
}

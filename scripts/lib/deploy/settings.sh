# shellcheck shell=bash
# Sourced by deploy_t4_optimized.sh: are .env, owl-sap.toml and the folder secrets complete and private? Values are
# looked at where they stand (grep, awk); none is printed, and none but paths and ports is read into a variable.
# shellcheck disable=SC2154  # names of base.sh and of the script itself

readonly placeholder='(change[-_ ]?(me|it|this)?|changeit|replace[-_ ]?me|your[-_ ].*|secret|password|passwort|geheim|todo|tbd|x{3,}|\.{3,}|<.*>)'

readonly example_host="[\"'][^\"']*example[.](com|org|net)[\"']"

# assignment NAME: an extended regular expression of the start of its line in .env
assignment() { printf '^[[:space:]]*(export[[:space:]]+)?%s=' "$1"; }

# env_has NAME...: does .env give one of these names a value?
env_has() {
  local name
  for name in "$@"; do
    grep -Eq "$(assignment "$name")[\"']?[^\"'[:space:]]" .env && return 0
  done
  return 1
}

# hana_toml_has KEY [VALUE]: does [hana] in owl-sap.toml set it (to what the regular expression VALUE describes)?
hana_toml_has() {
  awk -v line="^[[:space:]]*$1[[:space:]]*=[[:space:]]*${2:-}" '/^[[:space:]]*\[/ { inside = /^[[:space:]]*\[hana\]/ }
    inside && $0 ~ line { found = 1 } END { exit !found }' owl-sap.toml
}

check_files() {
  [[ -f .env ]] || refuse ".env is missing. Make it from the example and fill it in: cp .env.example .env && chmod 600 .env"
  [[ -r .env ]] || refuse ".env cannot be read by $(id -un). Give it to that user: sudo chown $(id -un) .env"
  [[ -z $(find -L .env -perm /007 2>/dev/null) ]] || refuse ".env holds the password and every user of this machine can read it: chmod 600 .env"
  [[ -z $(find -L .env -perm /070 2>/dev/null) ]] || note ".env can be read by its group: chmod 600 .env"
  ! grep -q $'\r' .env || refuse ".env has the line ends of Windows, which would become part of the values: sed -i 's/\\r\$//' .env"
  # Docker would make a folder of this name if the file were missing.
  [[ -f owl-sap.toml ]] || refuse "owl-sap.toml is missing. Make it from the example: cp owl-sap.example.toml owl-sap.toml"
}

check_complete() {
  local key missing=()
  for key in HOST USER PASSWORD; do
    env_has "HANA_$key" "HANA_${key}_FILE" "OWL_SAP_HANA__$key" "OWL_SAP_HANA__${key}_FILE" || hana_toml_has "${key,,}" ||
      missing+=("HANA_$key")
  done
  [[ ${#missing[@]} -eq 0 ]] || refuse ".env gives no value to ${missing[*]}. Add it there; .env.example describes each."
}

# The names in .env whose value is a placeholder.
placeholders() {
  grep -Ei "$(assignment '(HANA_|OWL_SAP_)[A-Z_]*(HOST|USER|PASSWORD)')[\"']?${placeholder}[\"']?[[:space:]]*$" .env |
    sed -E 's/^[[:space:]]*(export[[:space:]]+)?([A-Z_]+)=.*/\2/'
  grep -Ei "$(assignment '(HANA_|OWL_SAP_)[A-Z_]*HOST')[\"']?([^\"'[:space:]]*\.)?example\.(com|org|net)[\"']?[[:space:]]*$" .env |
    sed -E 's/^[[:space:]]*(export[[:space:]]+)?([A-Z_]+)=.*/\2/'
}

check_values() {
  local names
  names=$(placeholders | tr '\n' ' ')
  [[ -z $names ]] || refuse ".env still holds a placeholder for ${names% }. Put the real value there."
  env_has HANA_HOST HANA_HOST_FILE OWL_SAP_HANA__HOST OWL_SAP_HANA__HOST_FILE || ! hana_toml_has host "$example_host" ||
    refuse "owl-sap.toml still names the example's host. Put the real one there, or HANA_HOST into .env."
  # Compose replaces $NAME and cuts at " #", outside single quotes: the login would fail, and HANA locks users.
  names=$(grep -E "$(assignment '[A-Z_]*PASSWORD')(([^'].*)?[\$]|[^'\"].*[[:space:]]#)" .env |
    sed -E 's/^[[:space:]]*(export[[:space:]]+)?([A-Z_]+)=.*/\2/' | tr '\n' ' ')
  [[ -z $names ]] || refuse "the value of ${names% } in .env holds \$ or #, which Compose would change. Put it in single quotes."
}

# Files that .env names: the container sees the folder secrets alone, as /run/secrets.
check_named_files() {
  local name path
  while IFS='=' read -r name path; do
    path=${path#[\"\']}
    path=${path%%[\"\'[:space:]]*}
    [[ -n $path ]] || continue
    [[ $path == /run/secrets/* ]] ||
      refuse "$name names a file that the container does not see. Put it into the folder secrets and write /run/secrets/NAME."
    [[ -s secrets/${path#/run/secrets/} ]] ||
      refuse "$name names a file that is not in the folder secrets (or is empty). Put it there, readable by user $user_id."
    # A note, for rootless Docker counts users in its own way.
    [[ -n $(find -L "secrets/${path#/run/secrets/}" \( -uid "$user_id" -o -gid "$user_id" -perm -040 -o -perm -004 \) 2>/dev/null) ]] ||
      note "the file that $name names is not readable by user $user_id of the container: sudo chown $user_id secrets/..."
  done < <(sed -nE 's/^[[:space:]]*(export[[:space:]]+)?((HANA_|OWL_SAP_)[A-Z_]*(_FILE|TRUST_STORE))=(.*)/\2=\5/p' .env | grep -v -e '-----BEGIN')
}

check_secrets_folder() {
  local open
  [[ -e secrets ]] || return 0
  [[ -d secrets ]] || refuse "secrets is no folder. Move the file away; certificates and keys go into a folder of that name."
  [[ -r secrets && -x secrets ]] ||
    refuse "the folder secrets cannot be looked into by $(id -un). Deploy as the user who did it first, or: sudo chgrp $(id -gn) secrets && sudo chmod 750 secrets"
  # A closed folder protects what is in it; certificates of authorities are public.
  [[ -n $(find -L secrets -maxdepth 0 -perm /001 2>/dev/null) ]] || return 0
  open=$(find -L secrets -type f -perm /007 ! -name '*.crt' ! -name '*.cer' ! -name '*ca.pem' 2>/dev/null | head -n 1)
  [[ -z $open ]] || refuse "$open can be read by every user of this machine: sudo chmod o= $open"
}

# Docker would make a folder of this name if the file were missing, and Alertmanager would end again and again.
check_receivers() {
  local file=${setting[OWL_ALERTMANAGER_CONFIG]}
  [[ $file != ./monitoring/* ]] || return 0
  [[ $file == ./* || $file == /* ]] || refuse "OWL_ALERTMANAGER_CONFIG is no path that Compose takes for a file. Write it with its folder: ./secrets/alertmanager.yml"
  [[ -s $file ]] || refuse "OWL_ALERTMANAGER_CONFIG names a file that is not there (or is empty): copy monitoring/alertmanager/alertmanager.yml and name your receivers."
  [[ -n $(find -L "$file" \( -gid "$user_id" -perm -040 -o -perm -004 \) 2>/dev/null) ]] ||
    refuse "the file that OWL_ALERTMANAGER_CONFIG names cannot be read by group $user_id of the container: sudo chown $user_id:$user_id $file && sudo chmod 640 $file"
}

# What the containers read where it stands here, as users of their own. A strict umask shuts them out.
check_readable() {
  local shut
  [[ -n $(find -L owl-sap.toml \( -perm -004 -o -gid "$user_id" -perm -040 -o -uid "$user_id" \) 2>/dev/null) ]] ||
    refuse "owl-sap.toml cannot be read by user $user_id of the container: sudo chgrp $user_id owl-sap.toml && sudo chmod 640 owl-sap.toml"
  ! hana_toml_has password || [[ -z $(find -L owl-sap.toml -perm /007 2>/dev/null) ]] ||
    refuse "owl-sap.toml holds the password and every user of this machine can read it: sudo chgrp $user_id owl-sap.toml && sudo chmod 640 owl-sap.toml"
  [[ $replicas == no || -z $certificate ]] ||
    refuse "the service has a certificate, and the proxy speaks no TLS to it. Take tls_certificate out of owl-sap.toml, or deploy without --replicas."
  [[ $replicas == no || -n $(find -L deployment/nginx/replicas.conf -perm -004 2>/dev/null) ]] ||
    refuse "deployment/nginx/replicas.conf cannot be read by the proxy: chmod o+r deployment/nginx/replicas.conf"
  [[ $monitoring == yes ]] || return 0
  check_receivers
  shut=$(find -L monitoring deployment/nvidia-t4/grafana \( -type d ! -perm -005 -o -type f ! -perm -004 \) 2>/dev/null | head -n 1)
  [[ -z $shut ]] ||
    refuse "$shut cannot be read by the containers of the monitoring: chmod -R o+rX monitoring deployment/nvidia-t4/grafana"
}

check_settings() {
  check_files
  check_complete
  check_values
  check_secrets_folder
  check_named_files
  check_readable
}

# --------------------------------------------------------------------------------------------------- keys and passwords

# A key whose hash is in no file of keys is worth nothing, so without that file the keys count as missing.
missing_secrets() {
  local name names=(keys.json deploy_key)
  [[ $monitoring == no ]] || names+=(metrics_token grafana_password)
  for name in "${names[@]}"; do
    [[ -s secrets/$name && ($name == grafana_password || -s secrets/keys.json) ]] || printf '%s ' "$name"
  done
}

# In a throwaway container of our own image, so that the files belong to the users of the containers that read them.
new_secrets=""
make_secrets() {
  local missing
  missing=$(missing_secrets)
  # shellcheck disable=SC2034  # read where the containers are started
  new_secrets=$missing
  [[ -n $missing ]] || return 0
  begin "making keys and passwords" "Run it again; what is in the folder secrets is kept."
  say "+ make in the folder secrets: ${missing% }"
  [[ $mode != dry-run ]] || return 0
  mkdir -p secrets || refuse "the folder secrets could not be made; the message above says why."
  # shellcheck disable=SC2086  # a list of words
  docker run --rm --network none --user 0:0 --cap-drop ALL --cap-add CHOWN --cap-add DAC_OVERRIDE --cap-add FOWNER \
    --volume "$PWD/secrets:/run/secrets" --env OWL_SAP_ACCESS__KEYS=/run/secrets/keys.json --entrypoint sh "$image" \
    -c "$(<scripts/lib/deploy/make-secrets)" make-secrets /run/secrets "$user_id" "$(id -g)" $missing ||
    refuse "keys and passwords could not be made; the message above says why. Nothing was started."
  say "Made, random, readable by their containers only: ${missing% } (read one: sudo cat secrets/NAME)"
}

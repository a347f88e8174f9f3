# shellcheck shell=bash
# Sourced by scripts/check, after venv.sh: programs whose pins contradict ours live in environments of their own.
#
#   ensure_tool NAME==VERSION    make .venv-tools/NAME if it does not hold just this version; 1 when that fails
#   tool_bin NAME                path of the program (which may not be there)

owl_tools="${owl_root:?venv.sh comes first}/.venv-tools"

tool_bin() { printf '%s/%s/bin/%s\n' "$owl_tools" "$1" "$1"; }

# The stamp is written last, so that half an environment is made anew.
ensure_tool() {
  local wanted=$1 name=${1%%==*} python
  local folder="$owl_tools/$name"
  local stamp="$folder/owl-sap-installed"
  if [[ -x "$(tool_bin "$name")" && -f $stamp && $(<"$stamp") == "$wanted" ]]; then return 0; fi
  python="$(venv_bin python)"
  venv_say "Installing $wanted into $folder"
  rm -rf "$folder"
  "$python" -m venv "$folder" || return 1
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$wanted" || return 1
  printf '%s\n' "$wanted" >"$stamp"
}

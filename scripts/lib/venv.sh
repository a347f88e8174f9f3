# shellcheck shell=bash
# Sourced by scripts/demo, scripts/test and scripts/check: one virtual environment in .venv with the three
# distributions of this repository, made once, reused after.
#
#   ensure_venv EXTRA    make .venv if absent, install this project with EXTRA unless that is already done
#   owl_root             the repository root
#   venv_bin NAME        path of a program in .venv (which may not be there)
#
# PYTHON names the interpreter to build with; otherwise the first of python3, python3.11 ... that is 3.11 or newer.

owl_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
owl_venv="$owl_root/.venv"

venv_say() { printf '%s\n' "$*" >&2; }

venv_bin() { printf '%s/bin/%s\n' "$owl_venv" "$1"; }

# Is "$1" a Python that can build our environment? Pyenv shims exist without working, so it is run.
venv_usable_python() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

venv_find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
    if venv_usable_python "$candidate"; then
      printf '%s\n' "$candidate"
      return 0
    fi
    if [[ -n "${PYTHON:-}" ]]; then
      venv_say "PYTHON=$PYTHON is not Python 3.11 or newer with the venv module."
      return 1
    fi
  done
  venv_say "Python 3.11 or newer with the venv module was not found." \
    "Install it (Debian, Ubuntu: apt install python3 python3-venv) or name one: PYTHON=/path/to/python3.11 $0"
  return 1
}

# A marker outlives an interrupted creation, so that the next run starts over instead of using half an environment.
venv_create() {
  local python marker="$owl_venv/owl-sap-incomplete"
  if [[ -x "$owl_venv/bin/python" && ! -e "$marker" ]]; then
    venv_usable_python "$owl_venv/bin/python" && return 0
    venv_say "$owl_venv does not work (moved, or older than Python 3.11). Remove it and run again: rm -rf '$owl_venv'"
    return 1
  fi
  python=$(venv_find_python) || return 1
  venv_say "Making $owl_venv with $("$python" --version)"
  mkdir -p "$owl_venv" && touch "$marker" || return 1
  "$python" -m venv "$owl_venv" || {
    venv_say "$python -m venv failed (see above)."
    return 1
  }
  rm -f "$marker"
}

# What was installed, as lines "checksum root extra": a changed pyproject.toml or a moved folder installs again.
venv_stamp_line() {
  printf '%s %s %s\n' "$(cat "$owl_root"/{,hana_emulator/,owl_sap_client/}pyproject.toml | cksum)" "$owl_root" "$1"
}

# The test extra holds every other one.
venv_installed() {
  local stamp="$owl_venv/owl-sap-installed"
  [[ -f "$stamp" ]] || return 1
  grep -qxF -e "$(venv_stamp_line "$1")" -e "$(venv_stamp_line test)" "$stamp"
}

ensure_venv() {
  local extra=$1
  venv_create || return 1
  venv_installed "$extra" && return 0
  venv_say "Installing owl-sap-connector[$extra] into $owl_venv (the first time takes minutes: torch is large)"
  "$owl_venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    -e "$owl_root/hana_emulator" -e "$owl_root/owl_sap_client" -e "${owl_root}[$extra]" || {
    venv_say "pip could not install owl-sap-connector[$extra]: see its message above. Is the package index reachable?"
    return 1
  }
  venv_stamp_line "$extra" >>"$owl_venv/owl-sap-installed"
}

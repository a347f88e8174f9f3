# shellcheck shell=bash
# Sourced by scripts/console-picture and the tests of the console: Chromium, from Debian's package `chromium`.
#
#   chromium_bin     path of the browser: $CHROMIUM, or on PATH, or a snap-free package's usual place; fails when it is nowhere
#   ensure_chromium  with CI=true and as root: install Debian's package and a font unless both are there already. Elsewhere
#                    nothing is installed: it says which package is missing

chromium_bin() {
  local name
  if [[ -n "${CHROMIUM:-}" ]]; then
    [[ -x "$CHROMIUM" ]] && printf '%s\n' "$CHROMIUM"
    return
  fi
  for name in chromium chromium-browser google-chrome-stable google-chrome; do
    # On Ubuntu the package chromium-browser is a script that asks for the snap, which no container has.
    if command -v "$name" >/dev/null && "$name" --version >/dev/null 2>&1; then
      command -v "$name"
      return
    fi
  done
  return 1
}

chromium_fonts() { compgen -G '/usr/share/fonts/truetype/*/*.ttf' >/dev/null || compgen -G '/usr/share/fonts/*/*.otf' >/dev/null; }

# Into `missing`: the packages that are not here.
chromium_missing() {
  missing=()
  chromium_bin >/dev/null || missing+=(chromium)
  # Without any font a page has no text: what a test sees of it would be empty boxes.
  chromium_fonts || missing+=(fonts-dejavu-core)
  [[ ${#missing[@]} -gt 0 ]]
}

ensure_chromium() {
  local missing lock
  chromium_missing || return 0
  if [[ "${CI:-}" != true || $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
    echo "for the tests of the console: install Debian's packages ${missing[*]}" >&2
    chromium_bin >/dev/null # a missing font alone is no reason to do without
    return
  fi
  # One at a time: tests run in several processes, and apt-get does not wait for another one's lists.
  exec {lock}>/run/owl-sap-chromium.lock || return 1
  flock "$lock"
  if chromium_missing; then
    apt-get -qq update >&2 &&
      DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends "${missing[@]}" >&2
  fi
  exec {lock}>&-
  chromium_bin >/dev/null
}

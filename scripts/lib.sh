# Shared by the scripts beside this file: finding Python, making the virtual environment, installing into it.

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

say() {
    printf '==> %s\n' "$*" >&2
}

# Prints a Python from 3.11 on that can make virtual environments. PYTHON names one to use instead of searching.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3 python3.13 python; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no Python from 3.11 on with the venv module was found: install one (Debian: apt-get install python3-venv)," \
        "or name it with PYTHON=/path/to/python"
}

# make_venv DIR: a virtual environment in DIR, kept if it is already a working one.
make_venv() {
    local venv=$1
    if [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    [ ! -e "$venv" ] || [ -e "$venv/pyvenv.cfg" ] || die "$venv exists and is not a virtual environment"
    local python
    python=$(find_python)
    say "making a virtual environment in $venv with $("$python" --version 2>&1)"
    "$python" -m venv "$venv"
}

# install_project VENV EXTRAS: this checkout, editable, with pinned dependencies; skipped if nothing changed since.
install_project() {
    local venv=$1 extras=$2 stamp wanted
    stamp="$venv/.installed${extras}"
    wanted="$(cat "$ROOT/pyproject.toml" "$ROOT/scripts/constraints.txt" | sha256sum) $ROOT"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        say "the installation in $venv is up to date"
        return
    fi
    say "installing SGLang and this package into $venv (several GB; minutes)"
    "$venv/bin/python" -m pip install -c "$ROOT/scripts/constraints.txt" -e "$ROOT$extras" >&2
    printf '%s' "$wanted" >"$stamp"
}

# find_chromium: true if Chromium is there; where it is not, root on Debian or Ubuntu installs it.
find_chromium() {
    local name
    for name in chromium chromium-browser google-chrome; do
        if command -v "$name" >/dev/null 2>&1; then return 0; fi
    done
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then return 1; fi
    say "installing Chromium for the demo's browser tests"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium; } >/dev/null 2>&1 || true
    command -v chromium >/dev/null 2>&1
}

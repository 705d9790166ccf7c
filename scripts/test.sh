#!/usr/bin/env bash
# Sets up what is missing and runs every check: ruff, mypy, then the tests. Tests marked slow (every law with every
# scripted drafter, for one) run with --all. Other arguments go to pytest in place of the default suites. The demo's
# browser tests run last, with servers of their own, if Chromium is there or can be installed.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib.sh
. "$ROOT/scripts/lib.sh"

VENV=${VENV:-$ROOT/.venv}
if [ "${1:-}" = --venv ]; then
    VENV=${2:?--venv needs a folder}
    shift 2
fi
SELECT=(-m "not slow")
if [ "${1:-}" = --all ]; then
    SELECT=()
    shift
fi
make_venv "$VENV"
install_project "$VENV" "[test]"
PYTHON_BIN=$(cd "$VENV" && pwd)/bin/python
cd "$ROOT"

say "preparing the target"
"$PYTHON_BIN" -m sglang_ext.cli prepare
say "ruff"
"$PYTHON_BIN" -m ruff check .
say "mypy"
"$PYTHON_BIN" -m mypy

SUITES=()
for suite in tests/unit tests/bench tests/training tests/demo tests/serving tests/server; do
    if [ -d "$suite" ]; then SUITES+=("$suite"); fi
done
BROWSER=()
if [ $# -eq 0 ]; then
    set -- "${SUITES[@]}"
    if find_chromium; then BROWSER=(tests/browser); else say "no Chromium: the demo's browser tests are left out"; fi
fi
# Models and data come from this machine: a test that reaches for a hub is a mistake and fails at once.
export HF_HUB_OFFLINE=1
STATUS=0
say "pytest $*"
"$PYTHON_BIN" -m pytest --durations=10 "${SELECT[@]}" "$@" || STATUS=$?
if [ ${#BROWSER[@]} -gt 0 ]; then
    say "pytest ${BROWSER[*]}"
    "$PYTHON_BIN" -m pytest --durations=10 "${SELECT[@]}" "${BROWSER[@]}" || STATUS=$?
fi
exit "$STATUS"

#!/usr/bin/env bash
# Sets up what is missing and runs every check: ruff, mypy, then the tests. Tests marked slow (every law with every
# scripted drafter, for one) run with --all. Other arguments go to pytest in place of the default suites.
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
for suite in tests/unit tests/bench tests/training tests/serving tests/server; do
    if [ -d "$suite" ]; then SUITES+=("$suite"); fi
done
[ $# -gt 0 ] || set -- "${SUITES[@]}"
say "pytest $*"
# Models and data come from this machine: a test that reaches for a hub is a mistake and fails at once.
HF_HUB_OFFLINE=1 exec "$PYTHON_BIN" -m pytest --durations=10 "${SELECT[@]}" "$@"

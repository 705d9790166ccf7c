#!/usr/bin/env bash
# From a fresh checkout to a running OpenAI-compatible SGLang server that decodes with FlexDraft, and its demo page.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib.sh
. "$ROOT/scripts/lib.sh"

usage() {
    cat <<USAGE
usage: bash scripts/quickstart.sh [--port PORT] [--demo-port PORT] [--no-demo] [--venv DIR] [-- SGLANG FLAGS...]

Makes a virtual environment, installs, prepares the default target, starts the server in the background, sends one
chat request, opens the demo page beside it and leaves both running. Run again, it does only what is missing.

  --port PORT        port of the server (default: 30000)
  --demo-port PORT   port of the demo page (default: 7860)
  --no-demo          do not start the demo page
  --venv DIR         the virtual environment (default: .venv in this checkout)
  --                 everything after it goes to the server as it is
USAGE
}

PORT=30000
DEMO_PORT=7860
VENV=$ROOT/.venv
while [ $# -gt 0 ]; do
    case $1 in
        --port) PORT=${2:?--port needs a number}; shift 2 ;;
        --demo-port) DEMO_PORT=${2:?--demo-port needs a number}; shift 2 ;;
        --no-demo) DEMO_PORT=""; shift ;;
        --venv) VENV=${2:?--venv needs a folder}; shift 2 ;;
        -h | --help) usage; exit 0 ;;
        --) shift; break ;;
        *) usage >&2; die "unknown argument $1" ;;
    esac
done
case $PORT in '' | *[!0-9]*) die "--port $PORT is not a number" ;; esac

make_venv "$VENV"
PYTHON_BIN=$(cd "$VENV" && pwd)/bin/python
"$PYTHON_BIN" - "$PORT" <<'PY' || die "port $PORT is in use: stop what listens there, or choose another with --port"
import socket, sys
with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind(("127.0.0.1", int(sys.argv[1])))
    except (OSError, OverflowError):
        sys.exit(1)
PY
if [ -n "$DEMO_PORT" ]; then install_project "$VENV" "[demo]"; else install_project "$VENV" ""; fi

say "preparing the target"
TARGET=$("$PYTHON_BIN" -m sglang_ext.cli prepare | tail -n 1)
say "checking the installation"
"$PYTHON_BIN" -m sglang_ext.cli doctor >&2

DEVICE=()
"$PYTHON_BIN" -c 'from sglang_ext.doctor import accelerator_name as name; raise SystemExit(not name())' ||
    DEVICE=(--device cpu)
COMMAND=("$PYTHON_BIN" -m sglang.launch_server --model-path "$TARGET" --speculative-algorithm flexdraft
    "${DEVICE[@]}" --port "$PORT" "$@")
LOG_DIR=${XDG_CACHE_HOME:-$HOME/.cache}/sglang_ext/logs
mkdir -p "$LOG_DIR"
LOG=$LOG_DIR/server-$PORT.log
say "starting the server: ${COMMAND[*]}"
say "its log: $LOG"
# A session of its own: closing this terminal does not stop the server.
setsid nohup "${COMMAND[@]}" >"$LOG" 2>&1 </dev/null &
SERVER=$!
trap 'kill -TERM -- "-$SERVER" 2>/dev/null || true' ERR INT TERM

"$PYTHON_BIN" "$ROOT/scripts/first_request.py" --port "$PORT" --pid "$SERVER" --log "$LOG"
trap - ERR INT TERM

DEMO=""
if [ -n "$DEMO_PORT" ]; then
    DEMO_LOG=$LOG_DIR/demo-$DEMO_PORT.log
    say "starting the demo page; its log: $DEMO_LOG"
    setsid nohup "$PYTHON_BIN" -m sglang_ext.cli demo --url "http://127.0.0.1:$PORT" --port "$DEMO_PORT" \
        >"$DEMO_LOG" 2>&1 </dev/null &
    DEMO=$!
    for _ in $(seq 120); do
        if grep -q "^The page is at" "$DEMO_LOG" || ! kill -0 "$DEMO" 2>/dev/null; then break; fi
        sleep 0.5
    done
    if ! grep -q "^The page is at" "$DEMO_LOG"; then
        tail -n 5 "$DEMO_LOG" >&2
        say "the demo page did not start (see above); the server is not affected"
        kill "$DEMO" 2>/dev/null || true
        DEMO=""
    fi
fi

echo
if [ -n "$DEMO" ]; then
    echo "Watch drafts being accepted and rejected on http://127.0.0.1:$DEMO_PORT (process $DEMO; stop it with: kill $DEMO)"
fi
echo "The server runs in the background as process $SERVER on http://127.0.0.1:$PORT (log: $LOG)."
echo "Stop it with:  kill $SERVER"
echo "Talk to it by typing:  curl -s http://127.0.0.1:$PORT/v1/chat/completions -H 'Content-Type: application/json'" \
    "-d '{\"model\": \"default\", \"temperature\": 0, \"messages\": [{\"role\": \"user\", \"content\": \"Why is the sky blue?\"}]}'"

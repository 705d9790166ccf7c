#!/usr/bin/env bash
# Where one decoding step's time goes at batch 1, and what FlexDraft adds to the server's memory.
# usage: bash scripts/recipes/bench_steps.sh DATA_FOLDER [further flags of both commands]
# About 5 minutes on two otherwise idle CPU cores.
set -euo pipefail

data=${1:?usage: bash scripts/recipes/bench_steps.sh DATA_FOLDER [flags]}
shift
sglang-ext bench steps --data "$data" "$@"
sglang-ext bench memory --data "$data" "$@"

#!/usr/bin/env bash
# FlexDraft against plain decoding on the default target: GSM8K and MT-Bench, batch 1, 4 and 16.
# usage: bash scripts/recipes/bench_smoke.sh DATA_FOLDER [further flags of `sglang-ext bench`]
# About 10 minutes on two otherwise idle CPU cores. DATA_FOLDER holds gsm8k_test*.jsonl and mt_bench*.jsonl.
set -euo pipefail

data=${1:?usage: bash scripts/recipes/bench_smoke.sh DATA_FOLDER [flags]}
shift
exec sglang-ext bench --smoke --data "$data" "$@"

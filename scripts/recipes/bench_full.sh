#!/usr/bin/env bash
# The published comparison: 40 prompts per dataset at batch 1, at least 6 rounds at batch 4 and 16, 256 tokens each.
# usage: bash scripts/recipes/bench_full.sh DATA_FOLDER [further flags of `sglang-ext bench`]
# About an hour on two otherwise idle CPU cores.
set -euo pipefail

data=${1:?usage: bash scripts/recipes/bench_full.sh DATA_FOLDER [flags]}
shift
exec sglang-ext bench --data "$data" "$@"

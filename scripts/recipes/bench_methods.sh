#!/usr/bin/env bash
# Every method against plain decoding on the same prompts, greedy and sampled, a server each: needs memory for five.
# usage: bash scripts/recipes/bench_methods.sh DATA DFLARE DFLASH [TEMPERATURE] [FLAGS ...]
set -euo pipefail

usage="usage: bash scripts/recipes/bench_methods.sh DATA DFLARE DFLASH [TEMPERATURE] [FLAGS ...]"
data=${1:?$usage} dflare=${2:?$usage} dflash=${3:?$usage} temperature=${4:-0}
shift $(($# < 4 ? $# : 4))
exec sglang-ext bench --smoke --data "$data" --methods "flexdraft,dflare=$dflare,dflash=$dflash,ngram" \
    --temperature "$temperature" "$@"

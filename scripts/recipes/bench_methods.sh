#!/usr/bin/env bash
# Every method against plain decoding on the same prompts, a server each: needs memory for four, about 5 GB each.
# SGLang's NGRAM takes part where it runs: its worker imports the CUDA kernels.
# usage: bash scripts/recipes/bench_methods.sh DATA DFLARE DFLASH [TEMPERATURE] [FLAGS ...]
set -euo pipefail

usage="usage: bash scripts/recipes/bench_methods.sh DATA DFLARE DFLASH [TEMPERATURE] [FLAGS ...]"
data=${1:?$usage} dflare=${2:?$usage} dflash=${3:?$usage} temperature=${4:-0}
shift $(($# < 4 ? $# : 4))
ngram=""
if python -c 'from sglang_ext.doctor import accelerator_name as name; raise SystemExit(not name())'; then ngram=",ngram"; fi
exec sglang-ext bench --smoke --data "$data" --methods "flexdraft,dflare=$dflare,dflash=$dflash$ngram" \
    --temperature "$temperature" "$@"

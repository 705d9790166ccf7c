#!/usr/bin/env bash
# A DFlare drafter for SmolLM2-135M, and DFlash with as many parameters, the same rows, steps and blocks.
# usage: bash scripts/recipes/train_tapped.sh TARGET OUT STEPS DATA.jsonl [DATA.jsonl ...]
# Both runs share the file of taps. Run the two commands side by side on a machine with two idle cores.
set -euo pipefail

usage="usage: bash scripts/recipes/train_tapped.sh TARGET OUT STEPS DATA.jsonl [DATA.jsonl ...]"
target=${1:?$usage} out=${2:?$usage} steps=${3:?$usage}
shift 3
common=(--target "$target" --data "$@" --steps "$steps" --tap-cache "$out/taps" --num-layers 3 --num-taps 5
    --block-size 8 --blocks-per-step 192 --anchors-per-sequence 48 --workers 1 --threads 1)

sglang-ext train dflare "${common[@]}" --out "$out/dflare"
# 1344 columns instead of 1536 make up for the fusion matrix.
sglang-ext train dflash "${common[@]}" --out "$out/dflash" --intermediate-size 1344

#!/usr/bin/env bash
# Almanac runs of Llama-3.2-1B's shape (random weights) on this GPU: 128x1024, 1024x128 and monkeys, everything at once
# and one goal (first token within 1 s), one start each, so marked short. Stopped, the same command goes on.
#
#   scripts/gpu.sh records OUT TOKENIZER.json penstock|vllm...
#
# OUT/ENGINE/SHAPE holds each run; then `penstock almanac add OUT/ENGINE`. vLLM is run by PYTHON_OF_VLLM (default python3),
# with the settings that it ran best with here (docs/performance.md).
set -euo pipefail
out=${1:?a folder} tokenizer=${2:?a tokenizer.json} && shift 2
model=$out/models/llama-3.2-1b
here=${PYTHON:-python3}
"$here" benchmarks/random_model.py llama-3.2-1b "$model" --tokenizer "$tokenizer"

measure() {  # ENGINE OPTIONS [MORE...]
    local engine=$1 options=$2 && shift 2
    local words=(--engine "$engine" --model "$model" --options "$options" --random-weights --short --goal 1 --no-ladder
        --out "$out/$engine" "$@")
    "$here" -m penstock bench run "${words[@]}" --shape 128x1024 --shape 1024x128 --at-once 1000
    "$here" -m penstock bench run "${words[@]}" --shape monkeys --at-once 8192
}

sizes=$(seq -s, 8 8 256),$(seq -s, 272 16 512),$(seq -s, 576 64 1024),$(seq -s, 1280 256 8192)
for engine in "$@"; do
    case "$engine" in
        penstock) measure penstock "--load-format dummy --max-model-len 4096" ;;
        vllm)
            measure vllm "--load-format dummy --dtype bfloat16 --max-model-len 4096 --max-num-seqs 8192
                --max-num-batched-tokens 32768 --gpu-memory-utilization 0.75 --async-scheduling
                --compilation-config '{\"cudagraph_capture_sizes\": [1,2,4,$sizes]}'" --python "${PYTHON_OF_VLLM:-python3}"
            ;;
        *) echo "no settings for $engine here: penstock or vllm" >&2 && exit 2 ;;
    esac
done

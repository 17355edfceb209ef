#!/usr/bin/env bash
# An edition's records on this machine: each model on each engine that is here, by `bench run --edition`. Prints every
# command before it runs; with --print it runs none. Stopped, the same command goes on, on another machine only from
# the engine's next start on, and the record then names both. An engine that fails stops no other; the end names it.
#
#   scripts/edition.sh [--print] OUT [MODEL...]      MODEL: llama-3.2-1b llama-3-8b qwen3-30b-a3b (all three), or
#                                                    gpt-oss-20b qwen3.5-35b-a3b; shapes of benchmarks/random_model.py
#
# Penstock runs by PYTHON (python3), vLLM and SGLang by PYTHON_OF_VLLM and PYTHON_OF_SGLANG where those are set: an
# interpreter, or a script that sets its environment and runs one. TOKENIZER: a tokenizer.json (the demo's).
# SHAPES ("128x1024 1024x128 1000x1000 monkeys"), PRICE (dollars an hour), REFERENCE (what
# benchmarks/reference_logprobs.py made of SMALL, the demo; without it answers are not compared), ENGINES (all).
# Weights are random, which the records say. Then: penstock almanac add OUT/records/*/*
set -uo pipefail
cd "$(dirname "$0")/.."

only_print=
[ "${1:-}" = --print ] && only_print=1 && shift
if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
fi
out=$1 && shift
[ $# -gt 0 ] || set -- llama-3.2-1b llama-3-8b qwen3-30b-a3b
here=${PYTHON:-python3}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
small=${SMALL:-src/penstock/demo/model}
read -ra shapes <<<"${SHAPES:-128x1024 1024x128 1000x1000 monkeys}"
failed=()

run() {  # WORDS...: prints a command as one line for a shell, then runs it
    printf '%q ' "$@" && echo
    [ -n "$only_print" ] || "$@"
}

precision() {  # MODEL: flags of both engines, the precision that people serve it in
    case "$1" in
        llama-3.2-1b) echo "--dtype bfloat16" ;;
        gpt-oss-20b) echo "" ;;  # MXFP4 by its config
        *) echo "--quantization fp8 --kv-cache-dtype fp8" ;;
    esac
}

lacking() {  # ENGINE PYTHON: the kernels' packages that the engine would use and this installation has not
    [ "$1" = penstock ] || [ -n "$only_print" ] || "$2" - <<'PYTHON'
from importlib.util import find_spec
for module, name in (("flashinfer", "FlashInfer"), ("deep_gemm", "DeepGEMM"), ("flash_mla", "FlashMLA")):
    if find_spec(module) is None:
        print(name)
PYTHON
}

settings() {  # ENGINE MODEL: "configuration|flags" a line; two at most, and a word why
    local exact; exact=$(precision "$2")
    case "$1" in
        # contexts of 4,096 hold all shapes; all else is Penstock's own choice
        penstock) echo "default|--load-format dummy --max-model-len 4096 $exact" ;;
        # as its documents start it, and with as many sequences and prompt tokens a step as all at once wants
        vllm)
            echo "default|--load-format dummy --max-model-len 4096 $exact"
            echo "batch|--load-format dummy --max-model-len 4096 --max-num-seqs 4096 --max-num-batched-tokens 16384 $exact"
            ;;
        # its two backends of attention, with pytorch's sampler where FlashInfer is not here
        sglang) for backend in fa3 triton; do echo "$backend|--load-format dummy --context-length 4096 --attention-backend $backend --sampling-backend pytorch ${exact//-dtype fp8/-dtype fp8_e4m3}"; done ;;
    esac
}

measure() {  # ENGINE PYTHON MODEL
    local engine=$1 python=$2 model=$3 peer=$1 name flags answers=() lacks=()
    [ "$engine" = sglang ] && peer=scripts/sglang.toml
    for part in $(lacking "$engine" "$python"); do lacks+=(--lacks "$part"); done
    if [ -n "${REFERENCE:-}" ]; then
        # of one setting: both have the same precision
        flags=$(settings "$engine" "$model" | sed -n '1s/^[^|]*|//p' | sed 's/--load-format dummy//; s/--[a-z-]*\(len\|length\) 4096//; s/^ *//; s/  */ /g')
        local file=$out/answers/$engine${flags// /}.json
        [ -n "$only_print" ] || mkdir -p "$out/answers"
        if [ -s "$file" ] || run "$here" -m penstock bench answers --engine "$peer" --python "$python" --model "$small" \
            --reference "$REFERENCE" --options "$flags" --out "$file"
        then answers=(--answers "$file")
        else failed+=("$engine: its answers with '$flags'")
        fi
    fi
    while IFS='|' read -r name flags <&3; do
        local place=$out/records/$engine-$name-$model
        run "$here" -m penstock bench run --engine "$peer" --python "$python" --model "$out/models/$model" --random-weights \
            --options "$flags" --configuration "$name" --edition --out "$place" ${PRICE:+--price "$PRICE"} \
            "${lacks[@]}" "${answers[@]}" "${shapes[@]/#/--shape=}" || failed+=("$engine $name $model: see $place")
    done 3< <(settings "$engine" "$model")
}

for model in "$@"; do
    run "$here" benchmarks/random_model.py "$model" "$out/models/$model" ${TOKENIZER:+--tokenizer "$TOKENIZER"} || exit 1
    for engine in ${ENGINES:-penstock vllm sglang}; do
        case "$engine" in
            penstock) measure penstock "$here" "$model" ;;
            vllm) [ -z "${PYTHON_OF_VLLM:-}" ] && [ -z "$only_print" ] || measure vllm "${PYTHON_OF_VLLM:-python3}" "$model" ;;
            sglang) [ -z "${PYTHON_OF_SGLANG:-}" ] && [ -z "$only_print" ] || measure sglang "${PYTHON_OF_SGLANG:-python3}" "$model" ;;
            *) echo "no settings for $engine here: penstock, vllm or sglang" >&2 && exit 2 ;;
        esac
    done
done
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}" >&2; exit 1; }

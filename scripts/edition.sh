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
# SHAPES ("128x1024 1024x128 1000x1000 monkeys"), CONTEXT (4096, tokens that hold them), PRICE (dollars an hour),
# REFERENCE (what benchmarks/reference_logprobs.py made of SMALL, the demo; without it answers are not compared),
# ENGINES (all that are here), MORE_FLAGS (for the servers of ENGINES).
# Weights are random, which the records say. Then: penstock almanac add OUT/records/*/*
set -uo pipefail

only_print=
[ "${1:-}" = --print ] && only_print=1 && shift
if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
fi

absolute() {  # PATH: of the caller's folder
    case "$1" in "" | /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac
}

interpreter() {  # NAME: a command stays as it is, a path becomes absolute
    case "$1" in */*) absolute "$1" ;; *) echo "$1" ;; esac
}

out=$(absolute "$1") && shift
[ $# -gt 0 ] || set -- llama-3.2-1b llama-3-8b qwen3-30b-a3b
small=$(absolute "${SMALL:-}") tokenizer=$(absolute "${TOKENIZER:-}") reference=$(absolute "${REFERENCE:-}")
declare -A pythons
pythons=([penstock]=$(interpreter "${PYTHON:-python3}") [vllm]=$(interpreter "${PYTHON_OF_VLLM:-}") [sglang]=$(interpreter "${PYTHON_OF_SGLANG:-}"))
cd "$(dirname "$0")/.." || exit 1
here=${pythons[penstock]}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
small=${small:-src/penstock/demo/model}
context=${CONTEXT:-4096}
read -ra shapes <<<"${SHAPES:-128x1024 1024x128 1000x1000 monkeys}"
failed=() engines=() child=

for engine in ${ENGINES:-penstock vllm sglang}; do
    [ -n "${pythons[$engine]+known}" ] || { echo "no settings for $engine here: penstock, vllm or sglang" >&2; exit 2; }
    if [ -n "${pythons[$engine]}" ] || [ -n "$only_print" ]; then
        engines+=("$engine")
    elif [ -n "${ENGINES:-}" ]; then
        echo "$engine: PYTHON_OF_${engine^^} is not set" >&2 && exit 2
    else
        echo "$engine: left out, PYTHON_OF_${engine^^} is not set" >&2
    fi
done

stop() {  # CODE: ends the command that runs, and the edition
    trap - INT TERM
    [ -z "$child" ] || { kill -TERM "$child" 2>/dev/null; wait "$child"; }
    exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM

run() {  # WORDS...: prints a command as one line for a shell, then runs it
    printf '%q ' "$@" && echo
    [ -z "$only_print" ] || return 0
    "$@" &
    child=$!
    wait "$child"
    local code=$?
    child=
    return "$code"
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
from pathlib import Path

# where engines carry each part, any suffices; vLLM's DeepGEMM compiles its kernels from its headers
PARTS = {
    "FlashInfer": ["flashinfer"],
    "DeepGEMM": ["deep_gemm", "vllm.third_party.deep_gemm.include"],
    "FlashMLA": ["flash_mla", "vllm._flashmla_C", "sgl_kernel.flashmla_ops"],
}


def there(name):  # looks for a part's file: importing an engine takes long and prints
    package, *rest = name.split(".")
    spec = find_spec(package)
    if spec is None or not rest:
        return spec is not None
    folders = [Path(folder, *rest[:-1]) for folder in spec.submodule_search_locations or ()]
    return any(any(folder.glob(f"{rest[-1]}*")) for folder in folders)


for part, names in PARTS.items():
    if not any(map(there, names)):
        print(part)
PYTHON
}

settings() {  # ENGINE MODEL: "configuration|flags" a line; two at most, and a word why
    local exact; exact="$(precision "$2")${MORE_FLAGS:+ $MORE_FLAGS}"
    case "$1" in
        # the context holds all shapes; all else is Penstock's own choice
        penstock) echo "default|--load-format dummy --max-model-len $context $exact" ;;
        # as its documents start it, and with as many sequences and prompt tokens a step as all at once wants
        vllm)
            echo "default|--load-format dummy --max-model-len $context $exact"
            echo "batch|--load-format dummy --max-model-len $context --max-num-seqs 4096 --max-num-batched-tokens 16384 $exact"
            ;;
        # its two backends of attention, with pytorch's sampler where FlashInfer is not here
        sglang) for backend in fa3 triton; do echo "$backend|--load-format dummy --context-length $context --attention-backend $backend --sampling-backend pytorch ${exact//-dtype fp8/-dtype fp8_e4m3}"; done ;;
    esac
}

version() {  # ENGINE PYTHON: as the package says, on the last line
    [ -n "$only_print" ] && echo VERSION || "$2" -c "import $1; print($1.__version__)" | tail -n 1
}

sum() {  # FILE: the first digits of its checksum
    [ -n "$only_print" ] && echo SUM || sha256sum "$1" | cut -c 1-12
}

measure() {  # ENGINE PYTHON MODEL
    local engine=$1 python=$2 model=$3 peer=$1 name flags parts with=() answers=() lacks=()
    [ "$engine" = sglang ] && peer=scripts/sglang.toml
    [ "$engine" = penstock ] || with=(--python "$python")  # penstock's record names the commit of the one that measures
    parts=$(lacking "$engine" "$python") || { failed+=("$engine: $python does not run"); return; }
    for part in $parts; do lacks+=(--lacks "$part"); done
    if [ -n "$reference" ]; then
        # of one setting: both have the same precision
        flags=$(settings "$engine" "$model" | sed -n '1s/^[^|]*|//p' | sed 's/--load-format dummy//; s/--[a-z-]*\(len\|length\) [0-9]*//; s/^ *//; s/  */ /g')
        local file=$out/answers/$engine-$(version "$engine" "$python")-$(sum "$reference")${flags//[ \/]/}.json
        if [ -s "$file" ] || run "$here" -m penstock bench answers --engine "$peer" "${with[@]}" --model "$small" \
            --reference "$reference" --options "$flags" --out "$file"
        then answers=(--answers "$file")
        else failed+=("$engine: its answers with '$flags'")
        fi
    fi
    while IFS='|' read -r name flags <&3; do
        local place=$out/records/$engine-$name-$model
        run "$here" -m penstock bench run --engine "$peer" "${with[@]}" --model "$out/models/$model" --random-weights \
            --options "$flags" --configuration "$name" --edition --out "$place" ${PRICE:+--price "$PRICE"} \
            "${lacks[@]}" "${answers[@]}" "${shapes[@]/#/--shape=}" || failed+=("$engine $name $model: see $place")
    done 3< <(settings "$engine" "$model")
}

for model in "$@"; do
    run "$here" benchmarks/random_model.py "$model" "$out/models/$model" ${tokenizer:+--tokenizer "$tokenizer"} || exit 1
    for engine in "${engines[@]}"; do measure "$engine" "${pythons[$engine]:-python3}" "$model"; done
done
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}" >&2; exit 1; }

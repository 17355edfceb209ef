#!/usr/bin/env bash
# Runs the sweeps of attention, over latent vectors too, the sampler, experts and the gate inside its product under compute-sanitizer, from the root of the repository, on a GPU machine.
#
#   scripts/sanitize.sh [TOOL...]     memcheck and racecheck by default; synccheck and initcheck exist too
#
# Each tool runs over a subset of each sweep that meets every kernel in every kind of step, within about a minute. Our
# kernels alone are checked: torch's have C++ names, and its sorts alone take a race checker minutes. Torch caches no memory
# meanwhile, so that a read beyond one tensor is not one of its neighbour's; captured graphs are left out, since they need
# that cache. It ends with 1 where a tool or a test found something, with 3 where the sanitizer cannot look at this device
# (gVisor). PYTHON names another interpreter, SECONDS_EACH another limit a run, LOGS a folder for what the tools say.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
limit=${SECONDS_EACH:-120}
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
if [ -z "$sanitizer" ]; then
    echo "compute-sanitizer is not installed: it comes with the CUDA toolkit" >&2
    exit 3
fi
export PYTHONPATH="${PYTHONPATH:-$PWD/src}" PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONUNBUFFERED=1
attention="test_small_steps or test_every_length or test_what_is_not_seen or (test_shapes and (6-2-80 or 16-1-256 or 4-1-64))"
sampler="test_bad_logits or test_rows_do_not_see or (all_kinds and (-7] or -300]))"
experts="test_all_to_the_same or (test_experts and (1-plain-torch.bf or 1-blocks-torch.bf or 1-channel-torch.bf or \
    5-channel-torch.bf or 130-plain-torch.bf or 900-blocks-torch.bf)) or (in_four and (-1] or -17])) or \
    (in_integers and 17-int4-torch.bf)"
gate="test_the_gate_inside and torch.bf and (8-8 or 128-64 or 1000-200)"
latent="torch.bf and ((heads_see and (2-plain or 2-eight) and (16-deep or 20-glm)) or (made and 8388608 and others) or is_stored)"
declare -A files=([attention]=triton_attention [sampler]=triton_sample [experts]=triton_moe [gate]=triton_rows [latent]=latent)
logs=${LOGS:-$(mktemp -d)}
tools=${*:-memcheck racecheck}

only_ours=(--target-processes application-only --error-exitcode 99 --kernel-name-exclude kns=_ZN --print-limit 20)
timeout "$limit" "$sanitizer" --tool memcheck "${only_ours[@]}" "$python" tests/kernels/planted_fault.py >"$logs/probe.log" 2>&1
if ! grep -q "Invalid __global__ write" "$logs/probe.log"; then
    grep -m 2 -i "not supported\|error" "$logs/probe.log" >&2
    echo "compute-sanitizer does not see a planted fault here (on gVisor it never can): try another machine" >&2
    exit 3
fi

found=0
for tool in $tools; do
    for sweep in "${!files[@]}"; do
        file=tests/kernels/test_${files[$sweep]}_gpu.py
        log=$logs/$tool.$sweep.log
        begun=$SECONDS
        timeout "$limit" "$sanitizer" --tool "$tool" "${only_ours[@]}" "$python" -m pytest -q -p no:cacheprovider "$file" \
            -k "(${!sweep}) and not captured" >"$log" 2>&1
        status=$?
        echo "$tool over the $sweep sweep: $(grep -E '[0-9]+ (passed|failed)' "$log" | tail -1)" \
            "$(grep -E 'SUMMARY' "$log" | tail -1) (status $status, $((SECONDS - begun)) s)"
        if [ $status -ne 0 ]; then
            found=1
            grep -E -A 3 '^=+ (Invalid|Error|Warning|Race|Program)' "$log" | head -40
            [ $status -eq 124 ] && echo "it did not come to its end in $limit s"
        fi
    done
done
exit $found

#!/usr/bin/env bash
# The three plans of docs/scale.md: plans.sh [FOLDER], with tables 1b.json, 8b.json and 70b-tp4.json in it; where there
# are none, tables by arithmetic are written there first. Prices are examples.
set -euo pipefail
tables=${1:-tables}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
[[ "$python" != */* ]] || python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") # used elsewhere
"$python" "$here/tables.py" "$tables" >/dev/null
simulate() {
    echo
    echo "\$ penstock simulate $*"
    "$python" -m penstock simulate "$@" 2> >(grep -v "of virtual time" >&2)
}
cd "$tables"

# 1. 100 M samples of word problems on a 1B: 97,657 prompts of 656 tokens, 1,024 samples each, which end by themselves.
samples=(--shape 656x128 --lengths geometric --max-tokens 1024 --samples 1024 --requests 97657 --price 3.5)
simulate --table 1b.json "${samples[@]}" --goal hours=24
simulate --table 1b.json "${samples[@]}" --goal hours=1
simulate --table 1b.json "${samples[@]}" --replicas 1000

# 2. A service of an 8B by a curve of the day, nobody at night.
curve=0,0,0,0,0,0,0.05,0.2,0.6,0.9,1,1,0.8,0.9,1,1,0.9,0.7,0.4,0.2,0.1,0.05,0,0
day=(--shape 900x250 --lengths geometric --max-tokens 1000 --price 3.5)
simulate --table 8b.json "${day[@]}" --rate 20 --seconds 180 --load-times 2 --goal ttft_p95=1 --goal tpot_p95=0.04
simulate --table 8b.json "${day[@]}" --rate 1 --seconds 86400 --curve "$curve" --scale 0:3 --cold-start 40 --idle 300

# 3. A 70B over an evaluation: 40,000 prompts of 1,500 tokens, answers of 400.
simulate --table 70b-tp4.json --shape 1500x400 --requests 40000 --price 3.5 --goal hours=1
simulate --table 70b-tp4.json --shape 1500x400 --requests 40000 --price 3.5 --replicas 16
simulate --table 70b-tp4.json --shape 1500x400 --rate 2 --goal ttft_p95=0.05 || true

#!/usr/bin/env bash
# Sets a GPU machine without a network up and runs one named check on it, from the root of the repository.
#
#   scripts/gpu.sh [--wheels FOLDER] train [ARGUMENTS]    train the demo model (scripts/demo/train.py)
#   scripts/gpu.sh [--wheels FOLDER] measure [ARGUMENTS]  measure a demo checkpoint (scripts/demo/measure.py)
#   scripts/gpu.sh [--wheels FOLDER] tests [ARGUMENTS]    all *_gpu.py, in WORKERS (8) processes beside each other
#   scripts/gpu.sh [--wheels FOLDER] pytest PATH...       run tests, one after the other
#   scripts/gpu.sh [--wheels FOLDER] sanitize [TOOL...]   the kernels' sweeps under compute-sanitizer
#   scripts/gpu.sh [--wheels FOLDER] shapes [ARGUMENTS]   speed of random models (benchmarks/shapes.py)
#   scripts/gpu.sh [--wheels FOLDER] edition [ARGUMENTS]  runs for the almanac (scripts/edition.sh)
#   scripts/gpu.sh [--wheels FOLDER] -- COMMAND...        run any command
#
# The machine's own python3 must hold torch with CUDA, and numpy, safetensors and tokenizers. What else is needed comes
# as wheels in FOLDER (default .whl), installed into /tmp/site; without that folder nothing is installed. The package
# itself is not installed: it is found through PYTHONPATH=src. PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
wheels=.whl
if [ "${1:-}" = --wheels ]; then
    wheels=${2:?--wheels needs a folder}
    shift 2
fi
if [ -d "$wheels" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site "$wheels"/*.whl
fi
export PYTHONPATH="$PWD/src:/tmp/site" PYTHONUNBUFFERED=1

check=${1:-}
[ $# -gt 0 ] && shift
case "$check" in
    train) exec "$python" scripts/demo/train.py "$@" ;;
    measure) exec "$python" scripts/demo/measure.py "$@" ;;
    tests)
        if ! "$python" -c "import xdist" 2>/dev/null; then
            echo "tests run beside each other need pytest-xdist: carry its wheel, or use: pytest FILE" >&2
            exit 2
        fi
        exec "$python" -m pytest -q -n "${WORKERS:-8}" --dist worksteal "$@" $(find tests -name "*_gpu.py")
        ;;
    sanitize) exec scripts/sanitize.sh "$@" ;;
    pytest) exec "$python" -m pytest -q "$@" ;;
    shapes) exec "$python" benchmarks/shapes.py "$@" ;;
    edition) exec scripts/edition.sh "$@" ;;
    --) exec "$@" ;;
    *)
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
        exit 2
        ;;
esac

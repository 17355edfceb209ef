#!/usr/bin/env bash
#SBATCH --job-name=penstock-run
#SBATCH --array=0-7
#SBATCH --gpus=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --open-mode=append
#SBATCH --output=penstock-run-%A_%a.log
#
# A folder of files of prompts through `penstock run`, over the tasks of a Slurm array, a GPU each:
#
#   sbatch --array=0-99 run_array.sh IN_FOLDER OUT_FOLDER --model Qwen/Qwen3-8B [engine options]
#
# Task i of N takes every N-th file (.jsonl, .jsonl.gz) from the i-th on; a file's rows come out under its own name. Each
# id is in the output exactly once: a task that was killed, or whose node died, goes on where it was when Slurm starts it
# again. 120 s before its time is over it stops at the end of a step and queues itself again. Files should be many more
# than tasks. An error of a file (a broken row, say) is told and the others go on; the task then ends with its code.
set -uo pipefail

if [ $# -lt 2 ]; then
  echo "run_array.sh IN_FOLDER OUT_FOLDER [options of penstock run]" >&2
  exit 2
fi
in=$1 out=$2
[[ $in != -* ]] || in=./$in # a name, and no option
[[ $out != -* ]] || out=./$out
shift 2
task=${SLURM_ARRAY_TASK_ID:-0} tasks=${SLURM_ARRAY_TASK_COUNT:-1} first=${SLURM_ARRAY_TASK_MIN:-0}
shopt -s nullglob
files=("$in"/*.jsonl "$in"/*.jsonl.gz)
if [ ${#files[@]} -eq 0 ]; then
  echo "no .jsonl or .jsonl.gz in $in" >&2
  exit 2
fi
mkdir -p "$out" || exit 1

child='' stopped='' failed=0
# shellcheck disable=SC2329  # the trap calls it
stop() {
  stopped=yes
  [ -z "$child" ] || kill -TERM "$child"
}
trap stop TERM

for ((i = task - first; i < ${#files[@]}; i += tasks)); do
  [ -z "$stopped" ] || break
  penstock run "${files[i]}" "$out/$(basename "${files[i]}" .gz)" "$@" &
  child=$!
  wait "$child"
  code=$?
  [ -z "$stopped" ] || wait "$child" # the signal ended the first wait; the child ends behind it
  child=''
  [ $code -eq 0 ] || failed=$code
done

if [ -n "$stopped" ]; then
  echo "stopped before its end: queued again"
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_${task}"
  exit 143
fi
exit "$failed"

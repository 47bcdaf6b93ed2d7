#!/usr/bin/env bash
# ReTool's cold start: fine-tune a chat model on transcripts with tool calls, on all GPUs, or on a CPU.
#   bash recipe/retool/train_sft.sh MODEL DATA OUT [key=value ...]
# MODEL: a folder or a hub name. DATA: a folder with train.parquet and, for the validation loss, val.parquet; or one
# parquet file. OUT: the run's folder; the model is OUT/huggingface. The same command resumes. CONFIG=sft_small is for a
# laptop; keys are those of recipe/dag/config/sft.yaml.
set -euo pipefail
usage="usage: bash recipe/retool/train_sft.sh MODEL DATA OUT [key=value ...]"
fail() { echo "error: $1; $usage" >&2; exit 2; }
[ $# -ge 3 ] || fail "MODEL, DATA and OUT are needed, $# given"
model=$1 data=$2 out=$3
shift 3
for value in "$model" "$data" "$out"; do
  case $value in
    '') fail "an argument is empty" ;;
    *=*) [ -e "$value" ] || fail "$value stands where MODEL, DATA or OUT is expected" ;;
    -*) fail "$value is not an option here" ;;
  esac
done
for override in "$@"; do
  case $override in
    -*) fail "$override is an option; MODEL, DATA, OUT and CONFIG take their place" ;;
    ?*=*) ;;
    *) fail "$override is not a setting, which is written as key=value" ;;
  esac
done
val=()
if [ -d "$data" ]; then
  [ -f "$data/train.parquet" ] || fail "$data/train.parquet does not exist"
  [ ! -f "$data/val.parquet" ] || val=(--val "$data/val.parquet")
  data=$data/train.parquet
elif [ ! -f "$data" ]; then
  fail "DATA $data does not exist"
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$root/recipe/dag/scripts/checks.sh"
need_packages "${PYTHON:-python3}"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
. "$root/recipe/dag/scripts/arguments.sh"
find_trackers console
exec "${PYTHON:-python3}" -m recipe.dag.cli sft "$data" --model "$model" --output "$out" ${val[@]+"${val[@]}"} \
  --config-name "${CONFIG:-sft}" ${trackers[@]+"${trackers[@]}"} "$@"

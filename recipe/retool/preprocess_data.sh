#!/usr/bin/env bash
# Turns a parquet file of problems into OUT/train.parquet and OUT/val.parquet: rows whose prompt or response is too long
# are left out, and 1000 rows are held out (a quarter, if no more than 1000 are left).
#   bash recipe/retool/preprocess_data.sh IN OUT TOKENIZER [options]
# IN: parquet file; OUT: folder; TOKENIZER: model folder or hub name. Options, with their defaults:
#   --max_prompt_length 2048  --max_response_length 4096  --num_workers 192  --prompt_key prompt  --response_key response
#   --workflow workflows/workflow_retool.yaml  --val_size 1000  --seed 42
set -euo pipefail

usage="usage: bash recipe/retool/preprocess_data.sh IN OUT TOKENIZER [--max_prompt_length N] [--val_size N] ..."
fail() { echo "error: $1; $usage" >&2; exit 2; }

names=(IN OUT TOKENIZER)
for index in 0 1 2; do
  value=${*:$((index + 1)):1}
  case $value in
    '' | -*) fail "${names[index]} is missing" ;;
    \<*\> | IN | OUT | TOKENIZER | path/to/* | /path/to/* | your_* | YOUR_*) fail "${names[index]} is a placeholder: $value" ;;
  esac
done
# relative paths are the caller's; a tokenizer may also be a name on the hub
absolute() { case $1 in /*) echo "$1" ;; '~'*) echo "${1/#\~/$HOME}" ;; *) echo "$PWD/$1" ;; esac; }
in=$(absolute "$1") out=$(absolute "$2") tokenizer=$3
[ -f "$in" ] || fail "IN does not exist or is a folder: $1"
case $out in *.parquet | *.json | *.jsonl) fail "OUT is a folder, which gets train.parquet and val.parquet, not a file: $2" ;; esac
[ ! -e "$out" ] || [ -d "$out" ] || fail "OUT is a file: $2"
[ ! -d "$tokenizer" ] || tokenizer=$(absolute "$tokenizer")
shift 3

filter=() split=() workflow=
while [ $# -gt 0 ]; do
  option=$1
  case $option in
    --*=*) value=${option#*=}; option=${option%%=*}; shift ;;
    --*) [ $# -gt 1 ] || fail "$option needs a value"; value=$2; shift 2 ;;
    *) fail "unexpected argument: $option" ;;
  esac
  case $option in
    --max_prompt_length | --max_response_length | --num_workers | --val_size)
      case $value in '' | *[!0-9]* | 0) fail "$option must be a whole number of 1 or more: $value" ;; esac ;;
    --seed) case $value in '' | *[!0-9]*) fail "$option must be a whole number: $value" ;; esac ;;
  esac
  case $option in
    --max_prompt_length | --max_response_length | --num_workers | --prompt_key | --response_key) filter+=("$option" "$value") ;;
    --workflow) workflow=$(absolute "$value") ;;
    --val_size | --seed) split+=("$option" "$value") ;;
    *) fail "unknown option: $option" ;;
  esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
workflow=${workflow:-workflows/workflow_retool.yaml}
[ -f "$workflow" ] || fail "--workflow does not exist: $workflow"
if ! command -v python > /dev/null || ! python -c "import pyarrow, transformers" 2> /dev/null; then
  . recipe/dag/scripts/cpu_env.sh
fi
mkdir -p "$out" 2> /dev/null || fail "OUT cannot be made: $out"
filtered=$out/.prefiltered.$$.parquet  # beside the result: it may be as large
trap 'rm -f "$filtered"' EXIT
python preprocess/prefilter.py --input "$in" --output "$filtered" --tokenizer "$tokenizer" --workflow "$workflow" \
  ${filter[@]+"${filter[@]}"}
python preprocess/split.py --input "$filtered" --local_dir "$out" ${split[@]+"${split[@]}"}

#!/usr/bin/env bash
# @name@ on a laptop: makes data and a model of a million parameters, trains it, evaluates it before and after.
#   bash @folder@/run_tiny_cpu.sh [SEED] [key=value ...]         or SEED=1
# Run the same command again to resume; delete outputs/@name@ to start over.
set -euo pipefail
task=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$task/@root@"   # @home@, where outputs/ is; change this line if you move the task
. @scripts@/tiny_cpu.sh
seed=$(seed_of "$@")
[ "${1:-}" != "$seed" ] || shift
name=$(tiny_name @name@ "$seed")
check "$seed" "$task/workflow.yaml" "$task/config" "$@"
python "$task/data.py" --local_dir "outputs/$name/data"
make_model "$name" "$seed" "$task/workflow.yaml" teacher.py:Teacher --problems 1024 --steps 150
train "$name" "$seed" "$task/workflow.yaml" "$task/config" \
  "data.train_files=outputs/$name/data/train.parquet" "data.val_files=outputs/$name/data/test.parquet" "$@"

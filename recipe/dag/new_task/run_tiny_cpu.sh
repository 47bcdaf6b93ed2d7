#!/usr/bin/env bash
# @name@ on a laptop: data, a model of a million parameters, training with the real code path, evaluation before and after.
#   bash @folder@/run_tiny_cpu.sh [key=value ...]          SEED=1 for another seed
# The same command resumes a run that was killed; delete outputs/@name@ to start anew.
set -euo pipefail
task=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$task/@root@"   # the checkout of verl-dag; change this line if you move the folder
. recipe/dag/scripts/tiny_cpu.sh
seed=${SEED:-0}
name=$(with_seed @name@ "$seed")
python "$task/data.py" --local_dir "outputs/$name/data"
make_model "$name" "$seed" "$task/workflow.yaml" teacher.py:Teacher --problems 1024 --steps 150
train "$name" "$seed" "$task/workflow.yaml" "$task/config" \
  "data.train_files=outputs/$name/data/train.parquet" "data.val_files=outputs/$name/data/test.parquet" "$@"

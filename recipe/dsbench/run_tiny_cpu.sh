#!/usr/bin/env bash
# DSBench's team on a laptop, from data to curve: small tables, a 1M-parameter model that three policies start from, and
# REINFORCE++ with a folder in the sandbox for each episode and a coach over HTTP, which this script starts and stops: a
# rule judge (recipe/dsbench/judge.py) behind OpenAI's interface.
#   bash recipe/dsbench/run_tiny_cpu.sh [SEED] [hydra overrides]         or SEED=1
# COACH_WEIGHT=0 trains without the coach's scores, from the same model. COACH_URL=http://HOST:PORT/v1 (COACH_MODEL, judge)
# takes another coach. Run the same command again to resume. Everything is written to outputs/dsbench_tiny (with a seed:
# ..._seed1; with another weight: ..._coach0).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/tiny_cpu.sh
. recipe/dag/scripts/coached.sh
name_run dsbench "$@"
[ "${1:-}" != "$seed" ] || shift
workflow=workflows/workflow_dsbench_tiny.yaml

check "$seed" "$workflow" recipe/dsbench/config workflow.nodes.scores.args.process="$weight" "$@"
python recipe/dsbench/tabular.py --local_dir "outputs/$base/data" --train_size 512 --test_size 64 --seed "$seed" \
  --file recipe/dsbench/kit.py
# the teacher reads no model and asks no coach, but the workflow names both
export MODEL_PATH=outputs/$base/model
make_model "$base" "$seed" "$workflow" recipe/dsbench/teacher.py:Teacher --problems 1024 --steps 400
[ -n "${COACH_URL:-}" ] || start_coach "outputs/$name" recipe/dsbench/judge.py:judge
export COACH_URL COACH_MODEL=${COACH_MODEL:-judge}
find_trackers console,tensorboard
beside_coach python -m recipe.dag.main --config-path recipe/dsbench/config --config-name tiny_cpu workflow="$workflow" \
  trainer.experiment_name="$name" seed="$seed" \
  data.train_files="outputs/$base/data/train.parquet" data.val_files="outputs/$base/data/test.parquet" \
  workflow.nodes.scores.args.process="$weight" ${trackers[@]+"${trackers[@]}"} "$@"

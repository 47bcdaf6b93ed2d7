#!/usr/bin/env bash
# MathChat on a laptop, from data to curve: problems, a 1M-parameter model that three policies start from, and REINFORCE++
# with the sandbox and with a coach over HTTP, which this script starts and stops: a rule judge (recipe/mathchat/judge.py)
# behind OpenAI's interface.
#   bash recipe/mathchat/run_tiny_cpu.sh [SEED] [hydra overrides]         or SEED=1
# COACH_WEIGHT=0 trains without the coach's scores, from the same model. COACH_URL=http://HOST:PORT/v1 (COACH_MODEL, judge)
# takes another coach. WEIGHTS=adapters trains LoRA adapters on one frozen model in place of separate weights. Run the same
# command again to resume. Everything is written to outputs/mathchat_tiny (with a seed: ..._seed1; with another weight:
# ..._coach0; adapters: mathchat_tiny_lora).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/tiny_cpu.sh
. recipe/dag/scripts/coached.sh
find_adapters 3.0e-3 solver coder verifier
name_run mathchat "$@"
[ "${1:-}" != "$seed" ] || shift
workflow=workflows/workflow_mathchat.yaml

# shellcheck disable=SC2016  # the variables are read by the configuration
settings=(${adapters[@]+"${adapters[@]}"} '~workflow.policies.coach.model'
  'workflow.policies.coach.api={base_url: "${oc.env:COACH_URL}", model: "${oc.env:COACH_MODEL}"}'
  workflow.nodes.scores.args.process="$weight")
check "$seed" "$workflow" recipe/mathchat/config "${settings[@]}" "$@"
python recipe/tiny/arithmetic.py --local_dir "outputs/$base/data" --train_size 2048 --test_size 64 --seed "$seed"
make_model "$base" "$seed" "$workflow" recipe/mathchat/teacher.py:Teacher --steps 600
[ -n "${COACH_URL:-}" ] || start_coach "outputs/$name" recipe/mathchat/judge.py:judge
export COACH_URL COACH_MODEL=${COACH_MODEL:-judge} MODEL_PATH=outputs/$base/model
find_trackers console,tensorboard
beside_coach python -m recipe.dag.main --config-path recipe/mathchat/config --config-name tiny_cpu workflow="$workflow" \
  trainer.experiment_name="$name" seed="$seed" \
  data.train_files="outputs/$base/data/train.parquet" data.val_files="outputs/$base/data/test.parquet" \
  "${settings[@]}" ${trackers[@]+"${trackers[@]}"} "$@"

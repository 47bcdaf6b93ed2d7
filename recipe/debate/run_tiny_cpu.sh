#!/usr/bin/env bash
# The debate on a laptop: installs, makes data and a 1M-parameter model, trains two solvers, a debater and a judge by the
# real code path, evaluates.
#   bash recipe/debate/run_tiny_cpu.sh [SEED] [hydra overrides]         SEED=1 does as well
# The same command resumes a run that was killed. Everything goes into outputs/debate_tiny (with a seed: ..._seed1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
seed=${SEED:-0}
case ${1:-} in '' | *[!0-9]*) ;; *) seed=$1; shift ;; esac
. recipe/dag/scripts/cpu_env.sh
name=debate_tiny$([ "$seed" = 0 ] || echo "_seed$seed")
workflow=${WORKFLOW:-workflows/workflow_debate.yaml}
python preprocess/arithmetic.py --mental --local_dir "outputs/$name/data" --train_size 4096 --test_size 64 --seed "$seed"
python -m recipe.tiny.build --workflow "$workflow" --teacher recipe/debate/teacher.py:Teacher \
  --output "outputs/$name/model" --seed "$seed" --problems 6000 --steps 1200
export MODEL_PATH="outputs/$name/model"
exec python -m recipe.dag.main --config-path recipe/debate/config --config-name tiny_cpu \
  workflow="$workflow" seed="$seed" trainer.experiment_name="$name" "$@"

#!/usr/bin/env bash
# ReTool-MA on a laptop: installs, makes data and a 1M-parameter model, trains it with the real code path, evaluates.
#   bash recipe/retool_ma/run_tiny_cpu.sh [hydra overrides]            SEED=1 for another seed
# The same command resumes a run that was killed. Everything goes into outputs/retool_ma_tiny (with SEED: ..._seed1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/cpu_env.sh
seed=${SEED:-0}
name=retool_ma_tiny$([ "$seed" = 0 ] || echo "_seed$seed")
workflow=${WORKFLOW:-workflows/workflow_retool_ma.yaml}
python preprocess/arithmetic.py --local_dir "outputs/$name/data" --train_size 2048 --test_size 64 --seed "$seed"
python -m recipe.tiny.build --workflow "$workflow" --teacher recipe/retool_ma/teacher.py:Teacher \
  --output "outputs/$name/model" --seed "$seed"
export MODEL_PATH="outputs/$name/model"
exec python -m recipe.dag.main --config-path recipe/retool_ma/config --config-name tiny_cpu \
  workflow="$workflow" seed="$seed" trainer.experiment_name="$name" "$@"

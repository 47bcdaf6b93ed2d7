#!/usr/bin/env bash
# Anti-coordination played by a 1M-parameter model through the real trainer, in three layouts of parameters:
# one policy for both players (shared), one that is told its role (role_token), a policy each with HAPPO (separate).
#   bash examples/games/run_tiny_cpu.sh [LAYOUT ...]                   SEED=1 for another seed
# Everything goes into outputs/games_LAYOUT. The payoff of every step is episode/reward in its metrics.jsonl.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/cpu_env.sh
seed=${SEED:-0}
data=outputs/games_data$([ "$seed" = 0 ] || echo "_seed$seed")
python preprocess/arithmetic.py --local_dir "$data" --train_size 256 --test_size 64 --seed "$seed"
[ $# -gt 0 ] || set -- shared role_token separate
for layout in "$@"; do
  name=games_$layout$([ "$seed" = 0 ] || echo "_seed$seed")
  workflow=examples/games/workflow_$layout.yaml
  python -m recipe.tiny.build --workflow "$workflow" --teacher examples/games/teacher.py:Teacher \
    --output "outputs/$name/model" --seed "$seed" --problems 512 --steps 100
  MODEL_PATH="outputs/$name/model" python -m recipe.dag.main --config-path recipe/retool_ma/config \
    --config-name tiny_cpu workflow="$workflow" seed="$seed" trainer.experiment_name="$name" \
    data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" data.train_batch_size=8 \
    trainer.total_training_steps=30 trainer.test_freq=-1 trainer.save_freq=30 trainer.val_before_train=false
done

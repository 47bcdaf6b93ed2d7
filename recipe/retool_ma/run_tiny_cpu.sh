#!/usr/bin/env bash
# ReTool-MA on a laptop: installs, makes data and a 1M-parameter model, trains it with the real code path, evaluates.
#   bash recipe/retool_ma/run_tiny_cpu.sh [SEED] [hydra overrides]         SEED=1 does as well
# The same command resumes a run that was killed. Everything goes into outputs/retool_ma_tiny (with a seed: ..._seed1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/tiny_cpu.sh
seed=$(seed_of "$@")
[ "${1:-}" != "$seed" ] || shift
name=$(with_seed retool_ma_tiny "$seed")
workflow=${WORKFLOW:-workflows/workflow_retool_ma.yaml}
python preprocess/arithmetic.py --local_dir "outputs/$name/data" --train_size 2048 --test_size 64 --seed "$seed"
make_model "$name" "$seed" "$workflow" recipe/retool_ma/teacher.py:Teacher
train "$name" "$seed" "$workflow" recipe/retool_ma/config "$@"

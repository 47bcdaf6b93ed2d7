#!/usr/bin/env bash
# CORY on a laptop: installs, makes data and a 1M-parameter model, trains two copies of it as pioneer and observer by the
# real code path, evaluates.
#   bash recipe/cory/run_tiny_cpu.sh [SEED] [hydra overrides]         SEED=1 does as well
# The same command resumes a run that was killed. Everything goes into outputs/cory_tiny (with a seed: ..._seed1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/tiny_cpu.sh
seed=$(seed_of "$@")
[ "${1:-}" != "$seed" ] || shift
name=$(with_seed cory_tiny "$seed")
workflow=${WORKFLOW:-workflows/workflow_cory.yaml}
python preprocess/arithmetic.py --local_dir "outputs/$name/data" --mental --train_size 4096 --test_size 64 --seed "$seed"
make_model "$name" "$seed" "$workflow" recipe/cory/teacher.py:Teacher \
  --problems 6000 --steps 1200
train "$name" "$seed" "$workflow" recipe/cory/config "$@"

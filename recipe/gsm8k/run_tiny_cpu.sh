#!/usr/bin/env bash
# Two different models on a laptop: installs the environment, makes data and two models with tokenizers, chat templates
# and sizes of their own, trains them as solver and checker, evaluates.
#   bash recipe/gsm8k/run_tiny_cpu.sh [SEED] [hydra overrides]         or SEED=1
# ALGORITHM=ippo, mappo, vdn, qmix, happo or cory replaces grpo. Run the same command again to resume. Everything is
# written to outputs/gsm8k_tiny (with a seed: ..._seed1; with another algorithm: ..._mappo).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/tiny_cpu.sh
. recipe/gsm8k/scripts/algorithm.sh
find_algorithm
seed=$(seed_of "$@")
[ "${1:-}" != "$seed" ] || shift
name=$(tiny_name gsm8k_tiny "$seed")${ALGORITHM:+_$ALGORITHM} workflow=workflows/workflow_gsm8k.yaml teacher=recipe/gsm8k/teacher.py:Teacher
check "$seed" "$workflow" recipe/gsm8k/config "$@"
python recipe/tiny/arithmetic.py --local_dir "outputs/$name/data" --mental --train_size 4096 --test_size 64 --seed "$seed"
make_model "$name" "$seed" "$workflow" "$teacher" --problems 6000 --steps 1200
make_model "$name/checker" "$seed" "$workflow" "$teacher" --problems 6000 --steps 1200 \
  --dialect gemma --vocab_size 480 --heads 3
export CHECKER_MODEL_PATH=outputs/$name/checker/model
train "$name" "$seed" "$workflow" recipe/gsm8k/config ${algorithm[@]+"${algorithm[@]}"} "$@"

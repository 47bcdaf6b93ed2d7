#!/usr/bin/env bash
# Two different models on GSM8K, on 2 to 8 CUDA GPUs of 80 GB: one solves, the other one checks, in two turns.
#   bash recipe/gsm8k/run_qwen.sh [hydra overrides]
# MODEL_PATH (Qwen/Qwen2.5-3B-Instruct) solves, CHECKER_MODEL_PATH (Qwen/Qwen3-4B-Instruct-2507) checks: folders or hub
# names. ALGORITHM=ippo, mappo, vdn, qmix, happo or cory replaces grpo. DATA_DIR (data/gsm8k) contains train.parquet and
# test.parquet, made by preprocess/gsm8k.py. WANDB_API_KEY or SWANLAB_API_KEY enable loggers. SHOW=1 checks the settings,
# prints the plan with the memory of each GPU (GPU_GB=80 where there is none), and exits.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/arguments.sh
check_arguments "$@"
. recipe/dag/scripts/launch.sh
. recipe/gsm8k/scripts/algorithm.sh
find_algorithm
refuse() { echo "error: $1" >&2; exit 2; }
data=${DATA_DIR:-data/gsm8k}
[ -n "${SHOW:-}" ] || need_gpu "try: bash recipe/gsm8k/run_tiny_cpu.sh"
case "${SHOW:+SHOW} $* " in SHOW\ * | *data.train_files=*) ;; *)
  need_packages "${PYTHON:-python3}"
  [ -f "$data/train.parquet" ] ||
    refuse "$data/train.parquet does not exist; make it: python preprocess/gsm8k.py --local_dir $data" ;;
esac
export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}
export CHECKER_MODEL_PATH=${CHECKER_MODEL_PATH:-Qwen/Qwen3-4B-Instruct-2507}
launch gsm8k "${WORKFLOW:-workflows/workflow_gsm8k.yaml}" \
  "data.train_files=$data/train.parquet" "data.val_files=$data/test.parquet" ${algorithm[@]+"${algorithm[@]}"} "$@"

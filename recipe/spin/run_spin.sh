#!/usr/bin/env bash
# Online DPO on CUDA GPUs: Qwen2.5-0.5B-Instruct (or any chat model) on GSM8K, SGLang rollouts, FSDP2 training.
#   bash recipe/spin/run_spin.sh [keys of verl's recipe `spin`, or hydra overrides]
# MODEL_PATH (Qwen/Qwen2.5-0.5B-Instruct) is a folder or a hub name. DATA_DIR (data/gsm8k) contains train.parquet and
# test.parquet, made by preprocess/gsm8k.py. WORKFLOW=workflows/workflow_spin_agents.yaml trains two agents. WANDB_API_KEY
# or SWANLAB_API_KEY enable loggers. SHOW=1 prints what the keys mean here and exits; it needs neither a GPU nor a model.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/arguments.sh
check_arguments "$@"
. recipe/dag/scripts/checks.sh
data=${DATA_DIR:-data/gsm8k} python=${PYTHON:-python3}
[ -n "${SHOW:-}" ] || need_gpu "try: bash recipe/spin/run_tiny_cpu.sh"
need_packages "$python"
case "${SHOW:+SHOW} $* " in SHOW\ * | *data.train_files=*) ;; *)
  [ -f "$data/train.parquet" ] || {
    echo "error: $data/train.parquet does not exist; make it: python preprocess/gsm8k.py --local_dir $data" >&2; exit 2; } ;;
esac
export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-0.5B-Instruct}
find_trackers console,tensorboard
exec "$python" -m recipe.spin.train ${SHOW:+--show} workflow="${WORKFLOW:-workflows/workflow_spin.yaml}" \
  "data.train_files=$data/train.parquet" "data.val_files=$data/test.parquet" ${trackers[@]+"${trackers[@]}"} "$@"

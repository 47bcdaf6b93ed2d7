#!/usr/bin/env bash
# ReTool-MA on a CUDA host: Qwen2.5-3B-Instruct (or any chat model), SGLang rollouts, FSDP2 training.
#   MODEL_PATH=/models/Qwen2.5-3B-Instruct bash recipe/retool_ma/run_qwen2_5-3b.sh [hydra overrides]
# DATA_DIR contains train.parquet and test.parquet (default data/competition, made by preprocess/competition.py: 40,000
# problems to train on, AMC and AIME to validate on; preprocess/ has scripts for other data).
# WORKFLOW=workflows/workflow_retool_ma_separate.yaml trains three policies. WANDB_API_KEY or SWANLAB_API_KEY enable loggers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tiny="without either, try: bash recipe/retool_ma/run_tiny_cpu.sh"
. recipe/dag/scripts/checks.sh
need_gpu "$tiny"
need_packages "${PYTHON:-python3}"
[ -n "${MODEL_PATH:-}" ] || { echo "error: set MODEL_PATH to a chat model (a folder or a hub name); $tiny" >&2; exit 2; }
export MODEL_PATH
data=${DATA_DIR:-data/competition}
case " $* " in *data.train_files=*) ;; *)
  [ -f "$data/train.parquet" ] || {
    echo "error: $data/train.parquet does not exist; make it: python preprocess/competition.py --local_dir $data" >&2; exit 2; } ;;
esac
. recipe/dag/scripts/arguments.sh
find_trackers console,tensorboard
exec "${PYTHON:-python3}" -m recipe.dag.main --config-path recipe/retool_ma/config --config-name qwen2_5_3b \
  workflow="${WORKFLOW:-workflows/workflow_retool_ma.yaml}" "data.train_files=$data/train.parquet" \
  "data.val_files=$data/test.parquet" ${trackers[@]+"${trackers[@]}"} "$@"

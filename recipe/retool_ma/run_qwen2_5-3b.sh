#!/usr/bin/env bash
# ReTool-MA on a CUDA host: Qwen2.5-3B-Instruct (or any chat model), SGLang rollouts, FSDP2 training.
#   MODEL_PATH=/models/Qwen2.5-3B-Instruct bash recipe/retool_ma/run_qwen2_5-3b.sh [hydra overrides]
# DATA_DIR contains train.parquet and test.parquet (default data/competition, made by preprocess/competition.py: 40,000
# problems to train on, AMC and AIME to validate on; preprocess/ has scripts for other data).
# WORKFLOW=workflows/workflow_retool_ma_separate.yaml trains three policies. WANDB_API_KEY or SWANLAB_API_KEY enable loggers.
# SHOW=1 checks the settings, prints the plan with the memory of each GPU (GPU_GB=80 where there is none), and exits.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/arguments.sh
. recipe/dag/scripts/launch.sh
refuse() { echo "error: $1" >&2; exit 2; }
tiny="without either, try: bash recipe/retool_ma/run_tiny_cpu.sh"
data=${DATA_DIR:-data/competition}
case "${SHOW:+SHOW} $*" in SHOW\ * | *platform=cpu*) ;; *) need_gpu "$tiny" ;; esac
[ -n "${MODEL_PATH:-}" ] || refuse "set MODEL_PATH to a chat model (a folder or a hub name); $tiny"
case "${SHOW:+SHOW} $* " in SHOW\ * | *data.train_files=*) ;; *)
  need_packages "${PYTHON:-python3}"
  [ -f "$data/train.parquet" ] ||
    refuse "$data/train.parquet does not exist; make it: python preprocess/competition.py --local_dir $data" ;;
esac
export MODEL_PATH
CONFIG=${CONFIG:-qwen2_5_3b} launch retool_ma "${WORKFLOW:-workflows/workflow_retool_ma.yaml}" \
  "data.train_files=$data/train.parquet" "data.val_files=$data/test.parquet" "$@"

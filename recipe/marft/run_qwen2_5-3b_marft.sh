#!/usr/bin/env bash
# MARFT on a CUDA host: Qwen2.5-3B-Instruct (or any chat model), SGLang rollouts, FSDP2 training.
#   MODEL_PATH=/models/Qwen2.5-3B-Instruct bash recipe/marft/run_qwen2_5-3b_marft.sh [siiRL's flags or hydra overrides]
# DATA_DIR contains train.parquet and test.parquet (preprocess/deepscaler.py; default data/deepscaler).
# WORKFLOW=workflows/workflow_marft_code.yaml trains on programming. WEIGHTS=adapters trains LoRA adapters on one frozen
# model in place of separate weights, the critics', too. WANDB_API_KEY or SWANLAB_API_KEY enable loggers.
# SHOW=1 prints the translation of the flags and exits; it needs neither a GPU nor a model.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tiny="without either, try: bash recipe/marft/run_tiny_cpu.sh"
. recipe/dag/scripts/checks.sh
[ -n "${SHOW:-}" ] || need_gpu "$tiny"
need_packages "${PYTHON:-python3}"
if [ -z "${SHOW:-}" ]; then
  case " $* " in *model.path=*) ;; *)
    [ -n "${MODEL_PATH:-}" ] || { echo "error: set MODEL_PATH to a chat model (a folder or a hub name); $tiny" >&2; exit 2; } ;;
  esac
fi
[ -z "${MODEL_PATH:-}" ] || export MODEL_PATH
data=${DATA_DIR:-data/deepscaler}
. recipe/dag/scripts/arguments.sh
find_trackers console,tensorboard
find_adapters 1.0e-5 reasoner actor
exec "${PYTHON:-python3}" -m recipe.marft.train --config-name qwen2_5_3b ${SHOW:+--show} \
  workflow="${WORKFLOW:-workflows/workflow_marft.yaml}" "data.train_files=$data/train.parquet" \
  "data.val_files=$data/test.parquet" ${trackers[@]+"${trackers[@]}"} ${adapters[@]+"${adapters[@]}"} "$@"

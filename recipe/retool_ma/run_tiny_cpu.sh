#!/usr/bin/env bash
# ReTool-MA on a laptop: installs, makes data and a 1M-parameter model, trains it with the real code path, evaluates.
#   bash recipe/retool_ma/run_tiny_cpu.sh [SEED] [hydra overrides]         SEED=1 does as well
# The same command resumes a run that was killed. Everything goes into outputs/retool_ma_tiny (with a seed: ..._seed1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/tiny_cpu.sh
tiny_run retool_ma workflows/workflow_retool_ma.yaml "--train_size 2048" "" "$@"

#!/usr/bin/env bash
# ReTool-MA in one conversation on a laptop: as run_tiny_cpu.sh, with roles that append to the same messages.
#   bash recipe/retool_ma/run_tiny_transcript_cpu.sh [SEED] [hydra overrides]         or SEED=1
# Run the same command again to resume. Everything is written to outputs/retool_ma_transcript_tiny (with a seed: ..._seed1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/tiny_cpu.sh
tiny_run retool_ma/transcript workflows/workflow_retool_ma_transcript.yaml "--train_size 2048" "" "$@"

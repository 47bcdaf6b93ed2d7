#!/usr/bin/env bash
# The baseline without a tool (workflows/workflow_no_tool.yaml) on a laptop:
#   bash recipe/retool_ma/run_tiny_no_tool_cpu.sh [SEED] [hydra overrides]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/tiny_cpu.sh
tiny_run retool_ma/no_tool workflows/workflow_no_tool.yaml "--train_size 2048" \
  "--teacher recipe/retool_ma/baseline_teacher.py:Teacher" "$@"

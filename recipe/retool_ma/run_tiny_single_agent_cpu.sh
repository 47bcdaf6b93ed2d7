#!/usr/bin/env bash
# The baseline of one agent with the interpreter (workflows/workflow_single_agent_tool.yaml) on a laptop:
#   bash recipe/retool_ma/run_tiny_single_agent_cpu.sh [SEED] [hydra overrides]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/tiny_cpu.sh
tiny_run retool_ma/single_agent workflows/workflow_single_agent_tool.yaml "--train_size 2048" \
  "--teacher recipe/retool_ma/baseline_teacher.py:Teacher" "$@"

#!/usr/bin/env bash
# ReTool-MA with an adapter per agent on a laptop: as run_tiny_cpu.sh, with three LoRA adapters on one frozen model.
#   bash recipe/retool_ma/run_tiny_lora_cpu.sh [SEED] [hydra overrides]         or SEED=1
# Run the same command again to resume. Everything is written to outputs/retool_ma_lora_tiny (with a seed: ..._seed1).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/tiny_cpu.sh
# a small model needs larger steps than the file's, which is for models of billions of parameters
adapters=(workflow.policies.{planner,executor,verifier}.lr=2.0e-3)
tiny_run retool_ma/lora workflows/workflow_retool_ma_lora.yaml "--train_size 2048" "" "$@"

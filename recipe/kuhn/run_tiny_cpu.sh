#!/usr/bin/env bash
# Kuhn poker in self-play on a laptop: installs the environment, makes a 1M-parameter model that knows the legal moves,
# trains it, and measures its exact exploitability after every step.
#   bash recipe/kuhn/run_tiny_cpu.sh [SEED] [hydra overrides]         or SEED=1; ARM=past
# Without ARM: reinforce with a moving average per role (SPIRAL). ARM=entropy_0.1: with an entropy bonus of 0.1. ARM=past:
# half of the games against a past self. Run the same command again to resume. Everything is written to outputs/kuhn_plain (or
# kuhn_ARM; with a seed: ..._seed1); python recipe/kuhn/curves.py compares all runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
arm=${ARM:-plain} workflow=workflows/workflow_kuhn.yaml settings=()
case $arm in
  plain) ;;
  entropy_[0-9]*) settings=("workflow.algorithm.entropy_coef=${arm#entropy_}") ;;
  past) workflow=workflows/workflow_kuhn_past.yaml ;;
  *) echo "error: ARM=$arm: it must be plain, entropy_0.1 (or another number) or past" >&2; exit 2 ;;
esac
. recipe/dag/scripts/tiny_cpu.sh
seed=$(seed_of "$@")
[ "${1:-}" != "$seed" ] || shift
settings+=("$@")
name=$(tiny_name "kuhn_$arm" "$seed")
check "$seed" "$workflow" recipe/kuhn/config ${settings[@]+"${settings[@]}"}
python recipe/kuhn/deals.py --local_dir outputs/kuhn_data
make_model "$name" "$seed" workflows/workflow_kuhn.yaml recipe/kuhn/teacher.py:Teacher --problems 4096 --steps 400
train "$name" "$seed" "$workflow" recipe/kuhn/config ${settings[@]+"${settings[@]}"}

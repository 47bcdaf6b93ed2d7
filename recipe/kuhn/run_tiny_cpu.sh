#!/usr/bin/env bash
# Kuhn poker in self-play on a laptop: installs the environment, makes a 1M-parameter model that knows the legal moves,
# trains it, and measures its exact exploitability after every step.
#   bash recipe/kuhn/run_tiny_cpu.sh [plain|entropy|past ...]          SEED=1 for another seed
# plain: reinforce with a moving average per role (SPIRAL); entropy: with an entropy bonus of 0.1; past: half of the games
# against a past self. Without a name, all three are trained. Runs are written to outputs/kuhn_NAME, a table and a figure
# of all runs to outputs/kuhn. Run the same command again to resume.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/arguments.sh
answer_help "$@"
chosen=${*:-plain entropy past}
for arm in $chosen; do
  case $arm in plain | entropy | past) ;; *) echo "error: $arm: choose plain, entropy or past" >&2; exit 2 ;; esac
done
set --  # tiny_cpu.sh checks the arguments of the script that sources it, and arms are no settings
. recipe/dag/scripts/tiny_cpu.sh
seed=${SEED:-0}
python recipe/kuhn/deals.py --local_dir outputs/kuhn_data
for arm in $chosen; do
  name=$(with_seed "kuhn_$arm" "$seed") workflow=workflows/workflow_kuhn.yaml settings=()
  case $arm in
    entropy) settings=(workflow.algorithm.entropy_coef=0.1) ;;
    past) workflow=workflows/workflow_kuhn_past.yaml ;;
  esac
  make_model "$name" "$seed" workflows/workflow_kuhn.yaml recipe/kuhn/teacher.py:Teacher --problems 4096 --steps 300
  (train "$name" "$seed" "$workflow" recipe/kuhn/config ${settings[@]+"${settings[@]}"})
  python recipe/kuhn/curves.py
done

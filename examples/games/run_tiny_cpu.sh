#!/usr/bin/env bash
# Small games, played by 1M-parameter models that know only the letters, with the real trainer.
#   bash examples/games/run_tiny_cpu.sh [GAME ...] [hydra overrides]          SEED=1 for another seed
# GAME is a name in the list below or its beginning (`climbing` plays three games); without it, all games are played,
# which takes long. relay_K has 2 to 5 symbols, additive_N and additive_vdn_N have 2 to 8 players. Runs are written to
# outputs/games_GAME. Run the same command again to resume.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/arguments.sh
answer_help "$@"
games="anti_coordination_shared anti_coordination_role_token anti_coordination_separate anti_coordination_lora
  separating_simultaneous separating_happo
  climbing_simultaneous climbing_sequential climbing_fast_follower
  relay_2 relay_3 relay_4 relay_5
  additive_2 additive_4 additive_8 additive_vdn_2 additive_vdn_4 additive_vdn_8
  lottery"
chosen="" names=() settings=()
for word in "$@"; do
  if is_setting "$word"; then settings+=("$word"); else names+=("$word"); fi
done
for word in ${names[*]:-$games}; do
  case $word in
    relay_[2-5] | additive_[2-8] | additive_vdn_[2-8]) matches=$word ;;
    *) matches=""; for game in $games; do case $game in "$word" | "$word"_*) matches="$matches $game" ;; esac; done ;;
  esac
  [ -n "$matches" ] || { echo "error: $word: unknown game; choose from" $games >&2; exit 2; }
  chosen="$chosen $matches"
done
set --  # tiny_cpu.sh checks the arguments of the script that sources it, and names of games are no settings
. recipe/dag/scripts/tiny_cpu.sh
seed=${SEED:-0}
python examples/games/rounds.py --local_dir outputs/games_data
for game in $chosen; do
  name=$(with_seed "games_$game" "$seed")
  workflow=examples/games/workflows/workflow_$game.yaml
  case $game in relay_* | additive_*)
    workflow=outputs/$name/workflow.yaml
    python examples/games/sized.py "$game" --output "$workflow" ;;
  esac
  make_model "$name" "$seed" "$workflow" examples/games/teacher.py:Teacher --problems 1024 --steps 100
  (train "$name" "$seed" "$workflow" examples/games/config \
    data.train_files=outputs/games_data/train.parquet data.val_files=outputs/games_data/test.parquet \
    ${settings[@]+"${settings[@]}"})
done

# Source this file in the repository's root: functions for the arguments of scripts.

# is_setting WORD: whether hydra or an edit of the workflow can read it: key=value, +key=value, ~key
is_setting() {
  [[ $1 =~ ^[+~]{0,2}[A-Za-z_][A-Za-z0-9_.*@/-]*(=|$) && ( $1 == *=* || $1 == "~"* ) ]]
}

# seed_of "$@": the first argument if it is a number, else $SEED, else 0
seed_of() { case ${1:-} in '' | *[!0-9]*) echo "${SEED:-0}" ;; *) echo "$1" ;; esac; }

# with_seed NAME SEED: the run's name, with the seed unless it is 0
with_seed() { echo "$1$([ "$2" = 0 ] || echo "_seed$2")"; }

# find_trackers NAMES: set `trackers` to the setting that adds W&B and SwanLab to NAMES, the run's loggers, if the
# environment has a key of theirs; else it is empty. WANDB_KEY is another name of WANDB_API_KEY.
find_trackers() {
  local names=$1
  trackers=()
  [ -z "${WANDB_KEY:-}" ] || export WANDB_API_KEY="${WANDB_API_KEY:-$WANDB_KEY}"
  [ -z "${WANDB_API_KEY:-}" ] || [[ ,$names, == *,wandb,* ]] || names+=,wandb
  [ -z "${SWANLAB_API_KEY:-}" ] || [[ ,$names, == *,swanlab,* ]] || names+=,swanlab
  [ "$names" = "$1" ] || trackers=("trainer.logger=[$names]")
}

# find_adapters LR AGENT ...: set `adapters` to the settings that make the policies with these names adapters of one frozen
# model, if $WEIGHTS is `adapters`; else it is empty. LR is their learning rate.
find_adapters() {
  local agent
  adapters=()
  case ${WEIGHTS:-separate} in
    separate) return ;;
    adapters) ;;
    *) echo "error: WEIGHTS=$WEIGHTS: it must be separate or adapters" >&2; exit 2 ;;
  esac
  # shellcheck disable=SC2016  # the variable is read by the configuration
  adapters=('+workflow.policies.base={model: {path: "${oc.env:MODEL_PATH}"}, frozen: true}')
  for agent in "${@:2}"; do
    adapters+=("~workflow.policies.$agent.model" "workflow.policies.$agent.lora.base=base" "workflow.policies.$agent.lr=$1")
  done
}

# answer_help "$@": print the script's header and end if the first argument asks for help. The script has gone to the
# repository's root by one `cd`.
answer_help() {
  local script=$0
  case ${1:-} in
    -h | --help)
      [[ $script == /* ]] || script=${OLDPWD:-.}/$script
      sed -n '2,/^set /s/^# \{0,1\}//p' "$script"
      exit 0 ;;
  esac
}

# check_arguments "$@": answer_help, and end a script whose arguments are [SEED] [key=value ...] with one line for a word
# that is neither.
check_arguments() {
  local word
  answer_help "$@"
  [[ ! ${1:-} =~ ^[0-9]+$ ]] || shift
  for word in "$@"; do
    is_setting "$word" || { echo "error: '$word' is not key=value" >&2; exit 2; }
  done
}

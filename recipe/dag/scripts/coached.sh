# Source this file in the repository's root: runs of recipes in which a coach scores every action.
#   . recipe/dag/scripts/coached.sh
. recipe/dag/scripts/arguments.sh
. recipe/dag/scripts/launch.sh

# name_run RECIPE "$@": set seed, weight (of the coach's scores, $COACH_WEIGHT), base (of the runs that share data and
# model) and name (of this run, with the weight unless it is 1)
name_run() {
  seed=$(seed_of "${@:2}") weight=${COACH_WEIGHT:-1}
  [[ $weight =~ ^[0-9]+(\.[0-9]+)?$ ]] || { echo "error: COACH_WEIGHT=$weight is not a number of 0 or more" >&2; exit 2; }
  base=$(tiny_name "$1_tiny" "$seed")
  name=$base$([ "$weight" = 1 ] || echo "_coach$weight")
}

# start_coach FOLDER FILE:FUNCTION: serve a function in OpenAI's form until the script ends, and set COACH_URL to its
# address; FOLDER gets its log
start_coach() {
  local log=$1/coach.log
  mkdir -p "$1"
  : > "$log"  # of an earlier run: its URL is gone
  python -m recipe.dag.cli serve --script "$2" --port 0 > "$log" 2> "$log.errors" &
  coach_server=$!
  trap '{ kill "$coach_server" && wait "$coach_server"; } 2>/dev/null || true' EXIT
  until COACH_URL=$(head -n 1 "$log") && [ -n "$COACH_URL" ]; do  # its first line is the URL
    kill -0 "$coach_server" 2>/dev/null || { cat "$log.errors" >&2; exit 1; }
    sleep 0.2
  done
  export COACH_URL
}

# beside_coach COMMAND ...: run a command, and pass a signal that ends this script on to it, so that the coach, which ends
# with the script, outlives it
beside_coach() {
  local run= code interrupted=
  trap 'interrupted=1; [ -z "$run" ] || kill -TERM "$run" 2>/dev/null || true' TERM INT HUP
  "$@" &
  run=$!
  [ -z "$interrupted" ] || kill -TERM "$run" 2>/dev/null || true  # the signal came before `run` was set
  while code=0; wait "$run" || code=$?; [ -n "$interrupted" ]; do interrupted=; done  # a trap ends a wait early
  return "$code"
}

# refuse MESSAGE: end the script with one line. No message repeats a value that may be the key.
refuse() { echo "error: $1; $usage" >&2; exit 2; }

# train_coached RECIPE COACH_MODEL DATA_COMMAND "AGENT ..." "$@": train workflow_RECIPE.yaml on CUDA GPUs, whose trained
# policies have the agents' names. "$@": MODEL [KEY] [-- key=value ...]. COACH_MODEL is the default of the variable with
# this name; DATA_COMMAND makes the data. The script's `usage` and `extra_settings` (an array) are used, and `other_data`, if it is set:
# advice about data that stands in for it.
train_coached() {
  local recipe=$1 default_coach=$2 data_command=$3 agents=() given=() key model part setting settings coach
  read -ra agents <<< "$4"
  shift 4
  while [ $# -gt 0 ] && [ "$1" != -- ]; do given+=("$1"); shift; done
  [ $# -eq 0 ] || shift
  [ ${#given[@]} -ge 1 ] || refuse "MODEL is missing"
  [ ${#given[@]} -le 2 ] || refuse "${#given[@]} arguments before --, at most 2 are taken"
  model=${given[0]%/} key=${given[1]:-}
  [ ${#given[@]} -eq 1 ] || [ -n "$key" ] || refuse "KEY is empty; leave it out for a coach without a key"
  case $model in
    '' | -* | *[\<\>]* | *path/to* | MODEL | your_* | YOUR_*) refuse "MODEL is missing or a placeholder" ;;
    *=*) refuse "MODEL looks like a setting; settings follow --" ;;
  esac
  case $key in
    *=*) refuse "KEY looks like a setting; settings follow --" ;;
    -* | *[\<\>]* | *[[:space:]]* | KEY | your_* | YOUR_*) refuse "KEY is a placeholder or an option" ;;
  esac
  for setting in "$@"; do
    is_setting "$setting" || refuse "'$setting' is not key=value"
  done
  [[ ${COACH_MODEL:-} =~ ^[A-Za-z0-9._:/@-]*$ ]] || refuse "COACH_MODEL has characters that no model's name has"
  case ${COACH_PROVIDER:-vertex} in vertex) ;; *) refuse "COACH_PROVIDER=$COACH_PROVIDER: it must be vertex, or unset" ;; esac
  [ -z "${COACH_PROVIDER:-}" ] || [ -z "$key${COACH_URL:-}" ] || refuse "COACH_PROVIDER takes neither KEY nor COACH_URL"
  case ${WEIGHTS:-separate} in
    separate | shared) adapters=() ;;
    adapters) find_adapters 1.0e-5 "${agents[@]}" ;;
    *) refuse "WEIGHTS=$WEIGHTS: it must be separate, shared or adapters" ;;
  esac

  if [ -e "$(absolute "$model")" ]; then
    [ -f "$(absolute "$model")/config.json" ] || refuse "MODEL: $model has no config.json"
    model=$(absolute "$model")
  fi
  local data=data/$recipe workflow=workflows/workflow_$recipe.yaml
  [ -z "${DATA_DIR:-}" ] || data=$(absolute "$DATA_DIR")

  settings=("model_path=$(quoted "$model")" ${adapters[@]+"${adapters[@]}"})
  for part in train test; do
    case "$* " in *"data.${part/test/val}_files="*) continue ;; esac
    settings+=("data.${part/test/val}_files=$(quoted "$data/$part.parquet")")
    [ -n "${SHOW:-}" ] || [ -f "$data/$part.parquet" ] ||
      refuse "$data/$part.parquet does not exist; make it: $data_command --local_dir $data${other_data:-}"
  done
  if [ "${WEIGHTS:-separate}" = shared ]; then
    for agent in "${agents[@]:1}"; do
      settings+=("workflow.agents.$agent.policy=${agents[0]}" "~workflow.policies.$agent")
    done
  fi
  # prompts state the limit, so it must be the one that the profile has memory for
  local profile=recipe/$recipe/config/${CONFIG:-full}.yaml most
  [ -f "$profile" ] || refuse "CONFIG=$CONFIG: recipe/$recipe/config has no $CONFIG.yaml"
  most=$(sed -n 's/^ *max_response_length: *\([0-9]*\).*/\1/p' "$profile")
  if [ -n "$most" ]; then  # else it is that of the profile full
    for agent in "${agents[@]}"; do settings+=("workflow.agents.$agent.sampling.max_tokens=$most"); done
  fi
  if [ -n "$key${COACH_URL:-}${COACH_PROVIDER:-}" ]; then
    coach="model: ${COACH_MODEL:-$default_coach}"
    if [ -n "$key" ]; then
      if [[ $key =~ ^[A-Z][A-Z0-9_]*$ ]]; then
        [ -n "${!key:-}" ] || refuse "KEY looks like the name of an environment variable, which is not set"
      else
        export COACH_API_KEY=$key
        key=COACH_API_KEY
      fi
      coach+=", key_env: $key"  # a name: the key itself is in no setting
    fi
    [ -z "${COACH_PROVIDER:-}" ] || coach+=", provider: $COACH_PROVIDER"
    # shellcheck disable=SC2016  # the variable is read by the configuration
    [ -z "${COACH_URL:-}" ] || coach+=', base_url: "${oc.env:COACH_URL}"'
    settings+=('~workflow.policies.coach.model' "workflow.policies.coach.api={$coach}")
  elif [ "${WEIGHTS:-}" = adapters ] && [ -z "${COACH_MODEL_PATH:-}" ]; then
    settings+=(workflow.agents.coach.policy=base '~workflow.policies.coach')  # the same frozen model
  fi
  settings+=(${extra_settings[@]+"${extra_settings[@]}"})
  launch "$recipe" "$workflow" "${settings[@]}" "$@"
}

# Source this file in the repository's root: functions that run a recipe on a laptop, with a tiny model (1M parameters).
#   . recipe/dag/scripts/tiny_cpu.sh
# It checks the script's arguments, [SEED] [key=value ...], and sets up the environment.
. "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"
check_arguments "$@"
[ "$(uname -s)" = Linux ] || { echo "error: the sandbox needs Linux (on Windows: WSL2)" >&2; exit 2; }
. "$(dirname "${BASH_SOURCE[0]}")/cpu_env.sh"

# tiny_name NAME SEED: the run's name; adapters ($WEIGHTS) and another base model ($BASE_STEPS, for a quick look) belong to
# other stages
tiny_name() {
  case ${WEIGHTS:-separate}${adapters:+,} in separate* | *,) ;; *)
    echo "error: WEIGHTS=$WEIGHTS: this script does not read it; unset it" >&2; exit 2 ;;
  esac
  echo "$(with_seed "$1$([ "${WEIGHTS:-}" != adapters ] || echo _lora)" "$2")${BASE_STEPS:+_base$BASE_STEPS}"
}

# make_model NAME SEED WORKFLOW TEACHER [options of recipe.tiny.build]; $BASE_STEPS overrides --steps
make_model() {
  python -m recipe.tiny.build --output "outputs/$1/model" --seed "$2" --workflow "$3" --teacher "$4" "${@:5}" \
    ${BASE_STEPS:+--steps "$BASE_STEPS"}
}

# check SEED WORKFLOW CONFIG_FOLDER [hydra overrides]: end the script with one line for what a run would refuse, before
# data and a model are made. Without settings there is nothing to check, and the check takes seconds.
check() {
  [ $# -eq 3 ] && [ -z "${WORKFLOW:-}" ] ||
    python -m recipe.dag.main --check --config-path "$3" --config-name tiny_cpu seed="$1" workflow="$2" "${@:4}"
}

# train NAME SEED WORKFLOW CONFIG_FOLDER [hydra overrides]: exec, so that the run gets the signals sent to the shell
train() {
  local trackers
  export MODEL_PATH="outputs/$1/model"
  find_trackers console,tensorboard
  exec python -m recipe.dag.main --config-path "$4" --config-name tiny_cpu \
    trainer.experiment_name="$1" seed="$2" workflow="$3" ${trackers[@]+"${trackers[@]}"} "${@:5}"
}

# tiny_run RECIPE[/VARIANT] WORKFLOW DATA_OPTIONS MODEL_OPTIONS "$@": the complete run of recipe/RECIPE, on arithmetic
# problems and with its own teacher. $WORKFLOW replaces WORKFLOW; the options go to recipe/tiny/arithmetic.py and
# recipe.tiny.build. The settings of $adapters come before those of "$@".
tiny_run() {
  local recipe=${1%%/*} run=${1//\//_} workflow=${WORKFLOW:-$2} data_options=$3 model_options=$4 seed name
  shift 4
  seed=$(seed_of "$@")
  [ "${1:-}" != "$seed" ] || shift
  name=$(tiny_name "${run}_tiny" "$seed")
  set -- ${adapters[@]+"${adapters[@]}"} "$@"
  check "$seed" "$workflow" "recipe/$recipe/config" "$@"
  # shellcheck disable=SC2086  # options are words
  python recipe/tiny/arithmetic.py --local_dir "outputs/$name/data" $data_options --test_size 64 --seed "$seed"
  # shellcheck disable=SC2086
  make_model "$name" "$seed" "$workflow" "recipe/$recipe/teacher.py:Teacher" $model_options
  train "$name" "$seed" "$workflow" "recipe/$recipe/config" data.train_files="outputs/$name/data/train.parquet" \
    data.val_files="outputs/$name/data/test.parquet" "$@"
}

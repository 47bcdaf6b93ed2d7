# Source me in the repository's root: a recipe's run on a laptop, with a model of a million parameters, and its steps.
#   . recipe/dag/scripts/tiny_cpu.sh
# Functions alone, and the environment: nothing here reads the arguments of the script that sources it.
. recipe/dag/scripts/cpu_env.sh
. recipe/dag/scripts/seed.sh

# make_model NAME SEED WORKFLOW TEACHER [options of recipe.tiny.build]
make_model() {
  python -m recipe.tiny.build --output "outputs/$1/model" --seed "$2" --workflow "$3" --teacher "$4" "${@:5}"
}

# train NAME SEED WORKFLOW CONFIG_FOLDER [hydra overrides]: the shell becomes the run, so a signal to it is the run's
train() {
  export MODEL_PATH="outputs/$1/model"
  exec python -m recipe.dag.main --config-path "$4" --config-name tiny_cpu \
    trainer.experiment_name="$1" seed="$2" workflow="$3" "${@:5}"
}

# tiny_run RECIPE[/VARIANT] WORKFLOW DATA_OPTIONS MODEL_OPTIONS "$@": the whole run of recipe/RECIPE, on arithmetic and with
# its own teacher. $WORKFLOW goes before WORKFLOW; the options are words of preprocess/arithmetic.py and recipe.tiny.build.
tiny_run() {
  local recipe=${1%%/*} run=${1//\//_} workflow=${WORKFLOW:-$2} data_options=$3 model_options=$4 seed name
  shift 4
  seed=$(seed_of "$@")
  [ "${1:-}" != "$seed" ] || shift
  name=$(with_seed "${run}_tiny" "$seed")
  # shellcheck disable=SC2086  # options are words
  python preprocess/arithmetic.py --local_dir "outputs/$name/data" $data_options --test_size 64 --seed "$seed"
  # shellcheck disable=SC2086
  make_model "$name" "$seed" "$workflow" "recipe/$recipe/teacher.py:Teacher" $model_options
  train "$name" "$seed" "$workflow" "recipe/$recipe/config" "$@"
}

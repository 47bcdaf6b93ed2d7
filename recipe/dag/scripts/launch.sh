# Source this file, after arguments.sh: the end of the scripts that train a recipe on CUDA GPUs.
#   . recipe/dag/scripts/launch.sh

. "$(dirname "${BASH_SOURCE[0]}")/checks.sh"

# hydra's quotes: any character may be in a path
quoted() { local text=${1//\\/\\\\}; echo "'${text//\'/\\\'}'"; }

# absolute PATH: relative to the folder in which the user typed the command, which is in $caller
absolute() { case $1 in /*) echo "$1" ;; *) echo "$caller/$1" ;; esac; }

# launch RECIPE WORKFLOW "$@": train with the profile $CONFIG of recipe/RECIPE and these settings; with SHOW=1, print the
# plan with the memory of each GPU instead. The script's `refuse` is used, and before a run its `preflight` if it has one.
launch() {
  local recipe=$1 workflow=$2 config=${CONFIG:-full} python=${PYTHON:-python3} profile loggers trackers
  shift 2
  [ -f "recipe/$recipe/config/$config.yaml" ] || refuse "CONFIG=$config: recipe/$recipe/config has no $config.yaml"
  profile=(--config-path "recipe/$recipe/config" --config-name "$config")
  if [ -n "${SHOW:-}" ]; then
    need_packages "$python"
    exec "$python" -m recipe.dag.cli plan "$workflow" "${profile[@]}" ${GPU_GB:+--gpu-gb "$GPU_GB"} "$@"
  fi
  case "$config $*" in
    tiny_cpu\ * | *platform=cpu*) ;;
    *) need_gpu "on a laptop: bash recipe/$recipe/run_tiny_cpu.sh" ;;
  esac
  need_packages "$python"
  ! declare -F preflight > /dev/null || preflight "$python" "$@"
  loggers=$(sed -n 's/^ *logger: \[\([a-z, ]*\)\].*/\1/p' "recipe/$recipe/config/$config.yaml" | tr -d ' ')
  find_trackers "${loggers:-console,tensorboard}"
  exec "$python" -m recipe.dag.main "${profile[@]}" workflow="$workflow" ${trackers[@]+"${trackers[@]}"} "$@"
}

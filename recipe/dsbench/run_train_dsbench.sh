#!/usr/bin/env bash
# The data science team on CUDA GPUs: three agents learn from a coach's score of every action.
#   bash recipe/dsbench/run_train_dsbench.sh MODEL [KEY] [-- key=value ...]
# MODEL  the folder or hub name of the model that each agent starts from
# KEY    the coach is an API, with this key: the name of the environment variable that holds it (GEMINI_API_KEY), or the
#        key itself, which the shell's history and this script's command line then show. Without KEY, the coach is a frozen
#        copy of MODEL that the run serves; with COACH_URL and no KEY, a server that needs no key.
# After --: settings of the run, and workflow.<key>=VALUE.
# Environment, with the defaults:
#   COACH_MODEL=gemini-2.5-pro    its name tells the provider (gpt-, claude-, gemini-), unless there is a COACH_URL
#   COACH_URL=                    a server with OpenAI's interface, such as http://localhost:8000/v1
#   CONFIG=full                   a profile in recipe/dsbench/config: full, small, tiny_cpu
#   DATA_DIR=data/dsbench         with train.parquet and test.parquet
#   DATA_ROOT=(DATA_DIR)          the folder that the paths of tables and answers are relative to: --data_root of
#                                 preprocess/dsbench.py
#   WEIGHTS=separate              or shared: one set of weights for the three agents
#   SHOW=1                        check the settings, print the plan with each GPU's memory (GPU_GB=80 where there is none)
set -euo pipefail
usage="usage: bash recipe/dsbench/run_train_dsbench.sh MODEL [KEY] [-- key=value ...]"
refuse() { echo "error: $1; $usage" >&2; exit 2; }

case ${1:-} in -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
given=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do given+=("$1"); shift; done
[ $# -eq 0 ] || shift
# no message repeats a value that may be the key
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
  [[ $setting =~ ^[+~]{0,2}[A-Za-z_][A-Za-z0-9_.*@/-]*(=|$) && ( $setting == *=* || $setting == "~"* ) ]] ||
    refuse "'$setting' is not key=value"
done
[[ ${COACH_MODEL:-} =~ ^[A-Za-z0-9._:/@-]*$ ]] || refuse "COACH_MODEL has characters that no model's name has"
weights=${WEIGHTS:-separate}
case $weights in separate | shared) ;; *) refuse "WEIGHTS=$weights: it must be separate or shared" ;; esac

# hydra's quotes: any character may be in a path
quoted() { local text=${1//\\/\\\\}; echo "'${text//\'/\\\'}'"; }
absolute() { case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac; }
[ ! -e "$model" ] || [ -f "$model/config.json" ] || refuse "MODEL: $model has no config.json"
[ ! -e "$model" ] || model=$(absolute "$model")
data=${DATA_DIR:+$(absolute "$DATA_DIR")} root=${DATA_ROOT:+$(absolute "$DATA_ROOT")}
[ -z "$root" ] || [ -d "$root" ] || refuse "DATA_ROOT: $root is not a folder"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
data=${data:-data/dsbench} config=${CONFIG:-full} workflow=workflows/workflow_dsbench.yaml
[ -f "recipe/dsbench/config/$config.yaml" ] || refuse "CONFIG=$config: recipe/dsbench/config has no $config.yaml"
python=${PYTHON:-python3}

settings=("workflow=$workflow" "model_path=$(quoted "$model")")
for part in train test; do
  case "$* " in *"data.${part/test/val}_files="*) continue ;; esac
  settings+=("data.${part/test/val}_files=$(quoted "$data/$part.parquet")")
  [ -n "${SHOW:-}" ] || [ -f "$data/$part.parquet" ] ||
    refuse "$data/$part.parquet does not exist; make it: python preprocess/dsbench.py or preprocess/tabular.py (README.md)"
done
if [ -n "$root" ]; then
  root="'${root//\'/\'\'}'"  # YAML's quotes, as the values of a workflow are
  settings+=("workflow.envs.folder.kwargs.data_root=$root" "workflow.nodes.task.args.data_root=$root")
fi
if [ "$weights" = shared ]; then
  settings+=(workflow.agents.modeler.policy=engineer workflow.agents.analyst.policy=engineer
    '~workflow.policies.modeler' '~workflow.policies.analyst')
fi
if [ -n "$key${COACH_URL:-}" ]; then
  coach="model: ${COACH_MODEL:-gemini-2.5-pro}"
  if [ -n "$key" ]; then
    if [[ $key =~ ^[A-Z][A-Z0-9_]*$ ]]; then
      [ -n "${!key:-}" ] || refuse "KEY looks like the name of an environment variable, which is not set"
    else
      export COACH_API_KEY=$key
      key=COACH_API_KEY
    fi
    coach+=", key_env: $key"  # a name: the key itself is in no setting
  fi
  [ -z "${COACH_URL:-}" ] || coach+=', base_url: "${oc.env:COACH_URL}"'
  settings+=('~workflow.policies.coach.model' "workflow.policies.coach.api={$coach}")
fi
profile=(--config-path recipe/dsbench/config --config-name "$config")
if [ -n "${SHOW:-}" ]; then
  exec "$python" -m recipe.dag.cli plan "$workflow" "${profile[@]}" ${GPU_GB:+--gpu-gb "$GPU_GB"} "${settings[@]:1}" "$@"
fi
case "$config $*" in
  tiny_cpu\ * | *platform=cpu*) ;;
  *)
    command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU ||
      refuse "no NVIDIA GPU here; on a laptop: bash recipe/dsbench/run_tiny_cpu.sh" ;;
esac
exec "$python" -m recipe.dag.main "${profile[@]}" "${settings[@]}" "$@"

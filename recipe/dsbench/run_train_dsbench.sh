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
#   CONFIG=full                   a profile in recipe/dsbench/config: full (8 GPUs), small (one or two)
#   DATA_DIR=data/dsbench         with train.parquet and test.parquet
#   DATA_ROOT=(DATA_DIR)          the folder that the paths of tables and answers are relative to: --data_root of
#                                 recipe/dsbench/prepare.py
#   WEIGHTS=separate              or shared: one set of weights for the three agents; or adapters: of one frozen model
#   COACH_PROVIDER=               vertex: Google's credentials (GOOGLE_APPLICATION_CREDENTIALS), VERTEX_PROJECT and
#                                 VERTEX_LOCATION take the place of KEY
#   WANDB_API_KEY, SWANLAB_API_KEY  turn these loggers on
#   SHOW=1                        check the settings, print the plan with each GPU's memory (GPU_GB=80 where there is none)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
usage="usage: bash recipe/dsbench/run_train_dsbench.sh MODEL [KEY] [-- key=value ...]" caller=$PWD extra_settings=()
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/coached.sh
if [ -n "${DATA_ROOT:-}" ]; then
  root=$(absolute "$DATA_ROOT")
  [ -d "$root" ] || refuse "DATA_ROOT: $root is not a folder"
  root="'${root//\'/\'\'}'"  # YAML's quotes, as the values of a workflow are
  extra_settings=("workflow.envs.folder.kwargs.data_root=$root" "workflow.nodes.task.args.data_root=$root")
fi
# preflight PYTHON "$@": the programs of a local sandbox run in this environment
preflight() {
  case "${*:2}" in *sandbox.url=http*) return 0 ;; esac
  "$1" -c 'import sys; from recipe.dag.app import doctor
try: doctor.check_dsbench()
except doctor.Note as note: sys.exit(f"error: {note}")' > /dev/null || exit 2
}
other_data="; or train on small synthetic tables: python recipe/dsbench/tabular.py --local_dir data/tabular, and DATA_DIR=data/tabular"
train_coached dsbench gemini-2.5-pro "python recipe/dsbench/prepare.py --input TASKS.json --data_root TABLES" "engineer modeler analyst" "$@"

#!/usr/bin/env bash
# MathChat on CUDA GPUs: three agents learn from a coach's score of every action.
#   bash recipe/mathchat/run_train_mathchat.sh MODEL [KEY] [-- key=value ...]
# MODEL  the folder or hub name of the model that each agent starts from
# KEY    the coach is an API, with this key: the name of the environment variable that holds it (GEMINI_API_KEY), or the
#        key itself, which the shell's history and this script's command line then show. Without KEY, the coach is a frozen
#        copy of MODEL that the run serves; with COACH_URL and no KEY, a server that needs no key.
# After --: settings of the run, and workflow.<key>=VALUE.
# Environment, with the defaults:
#   COACH_MODEL=gemini-2.5-flash  its name tells the provider (gpt-, claude-, gemini-), unless there is a COACH_URL
#   COACH_URL=                    a server with OpenAI's interface, such as http://localhost:8000/v1
#   CONFIG=full                   a profile in recipe/mathchat/config: full (8 GPUs), two_gpus, small (one GPU)
#   DATA_DIR=data/mathchat        with train.parquet and test.parquet
#   WEIGHTS=separate              or shared: one set of weights for the three agents; or adapters: of one frozen model
#   COACH_PROVIDER=               vertex: Google's credentials (GOOGLE_APPLICATION_CREDENTIALS), VERTEX_PROJECT and
#                                 VERTEX_LOCATION take the place of KEY
#   WANDB_API_KEY, SWANLAB_API_KEY  turn these loggers on
#   SHOW=1                        check the settings, print the plan with each GPU's memory (GPU_GB=80 where there is none)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
usage="usage: bash recipe/mathchat/run_train_mathchat.sh MODEL [KEY] [-- key=value ...]" caller=$PWD extra_settings=()
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/coached.sh
train_coached mathchat gemini-2.5-flash "python preprocess/competition.py" "solver coder verifier" "$@"

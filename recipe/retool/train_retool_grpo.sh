#!/usr/bin/env bash
# GRPO of the ReTool agent on a CUDA host, from the weights of the SFT cold start.
#   bash recipe/retool/train_retool_grpo.sh SFT_MODEL DATA_DIR OUTPUT_DIR [EXPERIMENT_NAME] [key=value ...]
# SFT_MODEL is a model's folder, or the output folder of an SFT run, whose newest checkpoint is taken. DATA_DIR contains
# train.parquet and val.parquet. CONFIG names the profile in recipe/retool/config: full (default, 8 GPUs of 80 GB),
# small (one GPU) or tiny_cpu. WORKFLOW=FILE replaces the workflow. WANDB_API_KEY or SWANLAB_API_KEY enable loggers.
# SHOW=1 checks the settings, prints the plan with the memory of each GPU (GPU_GB=80 where there is none), and exits.
set -euo pipefail
usage="usage: bash recipe/retool/train_retool_grpo.sh SFT_MODEL DATA_DIR OUTPUT_DIR [EXPERIMENT_NAME] [key=value ...]"
refuse() { echo "error: $*" >&2; exit 2; }
. "$(dirname "${BASH_SOURCE[0]}")/../dag/scripts/arguments.sh"

positional=()
while [ $# -gt 0 ] && ! is_setting "$1"; do positional+=("$1"); shift; done
for argument in "$@"; do is_setting "$argument" || refuse "$argument: it follows a key=value; $usage"; done
[ ${#positional[@]} -ge 3 ] || refuse "${#positional[@]} of 3 arguments; $usage"
[ ${#positional[@]} -le 4 ] || refuse "${positional[4]}: a fifth argument that is not key=value; $usage"
names=(SFT_MODEL DATA_DIR OUTPUT_DIR EXPERIMENT_NAME)
for index in "${!positional[@]}"; do
  case ${positional[$index]} in
    '' | *[\<\>]* | *...* | *path/to* | *PATH_TO* | *[Yy]our[_-]* | *YOUR_* | "${names[$index]}")
      refuse "${names[$index]}: '${positional[$index]}' is a placeholder; $usage" ;;
  esac
done
model=${positional[0]%/} data=${positional[1]%/} output=${positional[2]%/} name=${positional[3]:-retool_grpo}

[ -d "$model" ] || refuse "SFT_MODEL: $model is not a folder; pass the folder of a model, or the output of an SFT run"
if [ ! -f "$model/config.json" ]; then
  found=$(find "$model" -path '*/global_step_*/huggingface/config.json' | sort -V | tail -n 1)
  [ -n "$found" ] || found=$(find "$model" -maxdepth 2 -path '*/huggingface/config.json')
  [ -n "$found" ] || refuse "SFT_MODEL: $model has neither config.json nor an SFT run's global_step_N/.../huggingface in it"
  model=${found%/config.json}
fi
for part in train val; do
  [ -f "$data/$part.parquet" ] || refuse "DATA_DIR: $data/$part.parquet does not exist; preprocess_data.sh makes it"
done
[ ! -e "$output" ] || [ -d "$output" ] || refuse "OUTPUT_DIR: $output is a file; pass a folder"
case $name in */*) refuse "EXPERIMENT_NAME: $name is a path; pass a name" ;; esac

caller=$PWD root=$(dirname "${BASH_SOURCE[0]}")/../..
. "$root/recipe/dag/scripts/launch.sh"
settings=(
  "model_path=$(quoted "$(absolute "$model")")"
  "data.train_files=$(quoted "$(absolute "$data/train.parquet")")"
  "data.val_files=$(quoted "$(absolute "$data/val.parquet")")"
  "output_dir=$(quoted "$(absolute "$output")")"
  "trainer.experiment_name=$(quoted "$name")"
)
workflow=${WORKFLOW:+$(absolute "$WORKFLOW")}
cd "$root"
launch retool "${workflow:-workflows/workflow_retool.yaml}" "${settings[@]}" "$@"

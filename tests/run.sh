#!/usr/bin/env bash
# Tests, in an environment of their own. Other arguments are pytest's.
#   bash tests/run.sh                         all, in three processes, held to tests/budgets.json
#   bash tests/run.sh --fast                  the style, and what needs neither Ray nor a model
#   bash tests/run.sh --changed [REVISION]    what the difference to HEAD, or to REVISION, reaches
#   bash tests/run.sh --failed                what failed last time
#   bash tests/run.sh --half 1                every second file (1 or 2): the whole suite on two machines
#   bash tests/run.sh --shuffle SEED          all, in another order
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VERL_DAG_EXTRA=dev
. recipe/dag/scripts/cpu_env.sh
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes would compile the project anew
suite=(python -m pytest -n 3 --dist loadfile --no-loadscope-reorder)
option=${1:-}
[[ $# == 0 ]] || shift
case $option in
  --fast)
    ruff check .
    ruff format --check .
    fast=(tests/{core,workflow,compat,loading,types,credit,endpoint,remote,episode,reward,report,envs,tools})
    fast+=(tests/test_{api,layers,docs,shipped}.py tests/app/test_{cli,launch}.py)
    fast+=(tests/settings/test_settings_absolute.py)
    exec "${suite[@]}" -m "not slow" "${fast[@]}" "$@" ;;
  --changed)
    revision=HEAD
    if [[ $# != 0 && $1 != -* ]]; then revision=$1; shift; fi
    mapfile -t reached < <(python tests/reach.py "$revision")
    [[ ${#reached[@]} != 0 ]] || { echo "nothing differs from $revision"; exit 0; }
    exec "${suite[@]}" "${reached[@]}" "$@" ;;
  --failed) exec "${suite[@]}" --last-failed --last-failed-no-failures none "$@" ;;
  "") exec "${suite[@]}" --budgets check ;;
  --half) half=$1; shift; exec "${suite[@]}" --half "$half" "$@" ;;
  *) exec "${suite[@]}" "$option" "$@" ;;
esac

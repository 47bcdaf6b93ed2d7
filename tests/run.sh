#!/usr/bin/env bash
# All tests, in an environment of their own:  bash tests/run.sh [pytest arguments]
# The style, and the tests of everything that needs neither Ray nor a model, in under two minutes:  bash tests/run.sh --fast
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VERL_DAG_EXTRA=dev
. recipe/dag/scripts/cpu_env.sh
if [[ "${1:-}" == --fast ]]; then
  shift
  ruff check .
  ruff format --check .
  fast=(tests/workflow tests/credit tests/episode tests/reward tests/report tests/envs tests/tools tests/test_*.py)
  skip=(tests/test_install.py tests/test_readme.py tests/test_cli_eval.py)
  exec python -m pytest -n 2 -m "not slow" "${fast[@]}" "${skip[@]/#/--ignore=}" "$@"
fi
exec python -m pytest "$@"

#!/usr/bin/env bash
# All tests, in an environment of their own:  bash tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VERL_DAG_EXTRA=dev
. recipe/dag/scripts/cpu_env.sh
exec python -m pytest "$@"

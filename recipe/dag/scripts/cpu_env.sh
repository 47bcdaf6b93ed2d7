# Source me: puts a Python environment without CUDA on PATH, made on first use in .venv (or $VERL_DAG_VENV).
#   . recipe/dag/scripts/cpu_env.sh        VERL_DAG_EXTRA=dev before it: what the tests need, too
# (By a variable, since a sourced file sees the arguments of the script that sources it.)
_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
_venv=${VERL_DAG_VENV:-$_root/.venv}
_extras=cpu${VERL_DAG_EXTRA:+,$VERL_DAG_EXTRA}
_python=${PYTHON:-}
if [ -z "$_python" ]; then
  for _candidate in python3.11 python3.12 python3 python; do
    if command -v "$_candidate" >/dev/null && "$_candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
      _python=$_candidate; break
    fi
  done
fi
[ -n "$_python" ] || { echo "error: Python 3.11 or 3.12 is needed; install one or set PYTHON=/path/to/python3.11" >&2; exit 2; }
_stamp="$_venv/.verl-dag-$(echo "$_root $_extras $(cksum < "$_root/pyproject.toml")" | cksum | tr ' ' -)"
if [ ! -e "$_stamp" ]; then
  echo "installing into $_venv (once, some minutes)"
  [ -x "$_venv/bin/python" ] || "$_python" -m venv "$_venv"
  # torch first and by its exact version, so that nothing below pulls the CUDA build
  "$_venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0
  "$_venv/bin/python" -m pip install -q --disable-pip-version-check -e "$_root[$_extras]"
  touch "$_stamp"
fi
export PATH="$_venv/bin:$PATH" VIRTUAL_ENV="$_venv"
# the dev environment is a superset: whoever asks for less finds it ready
[ "$_extras" = cpu ] || touch "$_venv/.verl-dag-$(echo "$_root cpu $(cksum < "$_root/pyproject.toml")" | cksum | tr ' ' -)"

# Source this file: it puts a Python environment without CUDA on PATH, made on first use in .venv (or $VERL_DAG_VENV).
#   . recipe/dag/scripts/cpu_env.sh        with VERL_DAG_EXTRA=dev set, the packages for tests are included
# (A variable, because a sourced file sees the arguments of the script that sources it.)
_root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
# An environment that several checkouts share has the code of one of them installed; a script runs that of its own.
# Threads that spin while they wait double the time of everything on a machine whose cores are busy.
_use_root() { export PYTHONPATH="$_root${PYTHONPATH:+:$PYTHONPATH}" OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}; }
if [ ! -f "$_root/pyproject.toml" ]; then  # an installed package: its environment is the one that is active
  _use_root
  return
fi
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
_torch=$(sed -n 's/^cpu = \["\(torch==[0-9.]*\)".*/\1/p' "$_root/pyproject.toml")

_install() { "$_venv/bin/python" -m pip install -q --disable-pip-version-check "$@"; }

_torch_version() { ls -d "$_venv"/lib/python3*/site-packages/torch-*.dist-info 2>/dev/null | sed 's/.*torch-//; s/[.]dist-info//'; }

# The CPU build: from the configured index if it has one, else from PyTorch's, with a short time-out; else any build.
_install_torch() {
  case $(_torch_version) in "${_torch#*==}" | "${_torch#*==}"+*) return ;; esac
  if [ "$(uname -s)" = Linux ]; then  # elsewhere every build is a CPU build
    _install --no-deps "$_torch+cpu" 2>/dev/null ||
      _install --no-deps --timeout 10 --retries 1 --index-url https://download.pytorch.org/whl/cpu "$_torch+cpu" 2>/dev/null ||
      echo "warning: no CPU build of $_torch: the configured package index has none, and PyTorch's does not answer." \
        "Installing the index's default build, on Linux usually the CUDA build: about 3 GB to download, 7 GB on disk." \
        "To avoid that, stop here (Ctrl-C), install a CPU wheel with $_venv/bin/pip, and run the command again." >&2
  fi
  _install "$_torch"
}

if [ ! -e "$_stamp" ]; then
  echo "installing into $_venv (once): about 0.5 GB to download, 2.2 GB on disk, 2 to 10 minutes"
  trap 'exit 130' INT  # pip turns Ctrl-C into a failure, which would try the next build
  [ -x "$_venv/bin/python" ] || "$_python" -m venv "$_venv"
  # torch first and by its exact version, so that nothing below pulls the CUDA build
  _install_torch
  echo "torch $(_torch_version) is installed; the other packages follow"
  _install -e "$_root[$_extras]"
  trap - INT
  touch "$_stamp"
fi
export PATH="$_venv/bin:$PATH" VIRTUAL_ENV="$_venv"
_use_root
# the dev environment is a superset, so it is ready for scripts that need only `cpu`, too
[ "$_extras" = cpu ] || touch "$_venv/.verl-dag-$(echo "$_root cpu $(cksum < "$_root/pyproject.toml")" | cksum | tr ' ' -)"

# Source this file: what the scripts on CUDA GPUs check before they start anything. Each check ends the script with one
# line on stderr and exit code 2.

# need_gpu ADVICE
need_gpu() {
  command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU ||
    { echo "error: no NVIDIA GPU here; $1" >&2; exit 2; }
}

# need_packages PYTHON [MODULE ...]: PYTHON has this project's packages, or the given ones
need_packages() {
  local python=$1 modules
  shift
  modules=${*:-omegaconf pydantic verl}
  command -v "$python" >/dev/null || { echo "error: there is no $python; $advice_on_packages" >&2; exit 2; }
  # shellcheck disable=SC2086  # modules are words
  "$python" -c 'import importlib.util as u, sys; sys.exit(any(u.find_spec(name) is None for name in sys.argv[1:]))' \
    $modules >/dev/null 2>&1 || { echo "error: $python lacks this project's packages; $advice_on_packages" >&2; exit 2; }
}
advice_on_packages="run bash recipe/dag/scripts/gpu_env.sh once, then source .venv-gpu/bin/activate, or set PYTHON"

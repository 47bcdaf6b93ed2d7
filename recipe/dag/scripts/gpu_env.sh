#!/usr/bin/env bash
# Makes the Python environment for CUDA GPUs, with all packages in the versions of requirements-gpu.lock; run it once on
# each host, or on one that shares the folder with the others. A second run has nothing to do.
#   bash recipe/dag/scripts/gpu_env.sh [--dry-run]
# --dry-run checks the host and prints the commands instead. Environment, with the defaults:
#   VERL_DAG_GPU_VENV=.venv-gpu   where it is made, in the root of the repository
#   PYTHON=python3.12             without uv, which brings its own Python 3.12
#   VERL_DAG_DRIVER_CHECK=on      off: for an older driver with NVIDIA's package cuda-compat-13-0
# It uses uv if that is installed, else venv and pip. Indexes, proxies and caches are those of uv and pip; models are not
# downloaded, and HF_HOME and HF_TOKEN are not read.
set -euo pipefail
fail() { echo "error: $1" >&2; exit 2; }
dry=
case "$#${1:-}" in
  0) ;;
  1--dry-run) dry=1 ;;
  1-h | 1--help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  *) fail "unknown arguments: $*; usage: bash recipe/dag/scripts/gpu_env.sh [--dry-run]" ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
venv=${VERL_DAG_GPU_VENV:-.venv-gpu} lock=requirements-gpu.lock
driver_needed=580 glibc_needed=2.34 disk_needed_gb=12

at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

[ "$(uname -s) $(uname -m)" = "Linux x86_64" ] ||
  fail "$(uname -s) on $(uname -m): the wheels of $lock are for Linux on x86_64"
glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d ' ' -f 2)
at_least "${glibc:-0}" "$glibc_needed" ||
  fail "glibc ${glibc:-missing}: $glibc_needed or newer is needed (Debian 12, Ubuntu 22.04, RHEL 9)"
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || driver=
if [ -n "$driver" ]; then
  [ "${VERL_DAG_DRIVER_CHECK:-on}" = off ] || at_least "$driver" "$driver_needed" ||
    fail "NVIDIA driver $driver: $lock has CUDA 13, which needs $driver_needed or newer; docs/running.md says what an older driver takes"
else
  echo "warning: no NVIDIA driver here, as on a login node; the hosts that train need $driver_needed or newer" >&2
fi

stamp="$venv/.verl-dag-$(cksum < "$lock" | tr ' ' -)"
if [ -e "$stamp" ]; then
  echo "$venv has the packages of $lock; activate it: source $venv/bin/activate"
  exit 0
fi
place=$(dirname "$venv")
[ -d "$place" ] || fail "VERL_DAG_GPU_VENV=$venv: there is no folder $place"
free=$(df -Pk "$place" | awk 'NR == 2 {print int($4 / 1000000)}')
[ "$free" -ge "$disk_needed_gb" ] ||
  fail "$(cd "$place" && pwd): $free GB free, $disk_needed_gb are needed; set VERL_DAG_GPU_VENV to a folder on another disk"

run() {
  if [ -n "$dry" ]; then printf '%q ' "$@"; echo; else "$@"; fi
}
# SGLang and verl ask for different versions of transformers, hence --no-deps: the lock file has every package
if command -v uv >/dev/null; then
  [ -x "$venv/bin/python" ] || run uv venv --python 3.12 "$venv"
  run uv pip install --python "$venv/bin/python" --no-deps -r "$lock" -e .
else
  python=${PYTHON:-python3.12}
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null ||
    fail "$python is not Python 3.12; install uv (https://docs.astral.sh/uv), which brings it, or set PYTHON=/path/to/python3.12"
  [ -x "$venv/bin/python" ] || run "$python" -m venv "$venv"
  run "$venv/bin/python" -m pip install --no-deps -r "$lock" -e .
fi
if [ -z "$dry" ]; then
  touch "$stamp"
  echo "activate the environment, and check it: source $venv/bin/activate && verl-dag doctor"
fi

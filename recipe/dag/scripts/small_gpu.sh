# Source this file in the repository's root: the beginning of the scripts that train a small pretrained model on one GPU.
#   recipe=RECIPE . recipe/dag/scripts/small_gpu.sh
# It checks the script's arguments, [SEED] [key=value ...], and the machine, sets `python` and `seed`, and drops SEED.
. recipe/dag/scripts/arguments.sh
check_arguments "$@"
. recipe/dag/scripts/checks.sh
python=${PYTHON:-python3} seed=$(seed_of "$@")
need_gpu "without one, try: bash recipe/$recipe/run_tiny_cpu.sh"
need_packages "$python"
[ "${1:-}" != "$seed" ] || shift

#!/usr/bin/env bash
# Evaluates a model on AIME with a code interpreter, through any server with OpenAI's interface (vLLM, SGLang,
# verl-dag serve, a provider): 30 problems, 32 samples each, up to 8 turns.
#   bash recipe/retool/evaluate_model.sh MODEL OUT BASE_URL SANDBOX_URL API_KEY [options] [key=value ...]
# MODEL        the server's name of the model
# OUT          the folder to write: retool_results.json, summary.json, results.json, episodes.jsonl. Run the same command
#              again to go on after an interruption and to repeat errors.
# BASE_URL     such as http://localhost:8000/v1
# SANDBOX_URL  a SandboxFusion server, whose token is read from $SANDBOX_TOKEN; or local: the project's own is started
# API_KEY      '' for none; -: it is already in $RETOOL_API_KEY, where no list of processes shows it
# Options, with their defaults:
#   --benchmark aime24        or aime25
#   --data NAME               a JSON, JSON Lines or parquet file with the problems, or a hub data set
#   --problems N              the first N problems only
#   --samples 32              per problem
#   --temperature 0.7  --top-p 0.9  --top-k 50
#   --max-turns 8             generations of an episode, the answer included
#   --max-tokens 16384        per generation
#   --requests 64             requests at once
#   --programs 32             programs at once; the project's own sandbox runs at most four per core, or 8
#   --request-timeout 300     seconds
#   --sandbox-timeout 30      seconds of one program
#   --seed 0
# key=value: settings of verl-dag eval, and workflow.<key>=VALUE.
set -euo pipefail

refuse() { echo "error: $1" >&2; exit 2; }
usage="bash recipe/retool/evaluate_model.sh MODEL OUT BASE_URL SANDBOX_URL API_KEY [options]"

case ${1:-} in -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
given=0
for argument in "${@:1:5}"; do
  case $argument in --*) break ;; esac
  given=$((given + 1))
done
[ "$given" = 5 ] || refuse "5 arguments are needed, $given given ('' for no key): $usage"
# no message repeats one of these values: in a wrong order, any of them may be the key
model=$1 out=$2 base_url=$3 sandbox_url=$4 key=$5
shift 5
[ -n "$model" ] || refuse "MODEL is empty; pass the server's name of the model: $usage"
[ -n "$out" ] || refuse "OUT is empty; pass the folder to write: $usage"
[ ! -e "$out" ] || [ -d "$out" ] || refuse "OUT is a file; pass a folder: $usage"
[[ $base_url =~ ^https?://[^/[:space:]]+ ]] || refuse "BASE_URL must be such as http://localhost:8000/v1: $usage"
[[ $sandbox_url =~ ^(local|https?://[^/[:space:]]+.*|http\+unix://.+)?$ ]] ||
  refuse "SANDBOX_URL must be local, empty, or such as http://localhost:8080: $usage"
if [ "$key" = - ]; then
  key=${RETOOL_API_KEY:-}
  [ -n "$key" ] || refuse "API_KEY is -, but RETOOL_API_KEY is not set; export it with the server's key"
fi

benchmark=aime24 data="" problems="" samples=32 temperature=0.7 top_p=0.9 top_k=50 max_turns=8 max_tokens=16384
requests=64 programs=32 request_timeout=300 sandbox_timeout=30 seed=0 overrides=()
whole='[1-9][0-9]{0,8}' number='([0-9]+(\.[0-9]*)?|\.[0-9]+)'
positive="(0*[1-9][0-9]*(\.[0-9]*)?|0*\.0*[1-9][0-9]*|0+\.0*[1-9][0-9]*)"

# take NAME VALUE PATTERN WHAT: set the variable of an option
take() {
  [[ $2 =~ ^$3$ ]] || refuse "$1 must be $4"
  local name=${1#--}
  printf -v "${name//-/_}" %s "$2"
}
while [ $# -gt 0 ]; do
  option=$1 value=${2-}
  case $option in
    --*=*) value=${option#*=} option=${option%%=*}; shift ;;
    --*) [ $# -ge 2 ] || refuse "$option needs a value; --help lists the options"; shift 2 ;;
    *)
      [[ $option =~ ^[+~]{0,2}[A-Za-z_][A-Za-z0-9_.*@/-]*(=|$) && ( $option == *=* || $option == "~"* ) ]] ||
        refuse "'$option' is neither an option nor key=value; --help lists the options"
      overrides+=("$option"); shift; continue ;;
  esac
  case $option in
    --benchmark) take "$option" "$value" "aime2[45]" "aime24 or aime25; --data takes other problems" ;;
    --data) take "$option" "$value" ".+" "a file or a hub data set" ;;
    --problems | --samples | --max-turns | --max-tokens | --requests | --programs)
      take "$option" "$value" "$whole" "a whole number, 1 or more" ;;
    --temperature) take "$option" "$value" "$number" "a number, 0 or more" ;;
    --top-p) take "$option" "$value" "(0*\.0*[1-9][0-9]*|0+\.0*[1-9][0-9]*|1(\.0*)?)" "above 0 and at most 1" ;;
    --top-k) take "$option" "$value" "($whole|-1)" "a whole number, 1 or more, or -1 for all tokens" ;;
    --request-timeout | --sandbox-timeout) take "$option" "$value" "$positive" "a number of seconds above 0" ;;
    --seed) take "$option" "$value" "(0|$whole)" "a whole number, 0 or more" ;;
    *) refuse "there is no option $option; --help lists the options" ;;
  esac
done

case $out in /*) ;; *) out=$PWD/$out ;; esac
if [ -n "$data" ] && [ -e "$data" ]; then case $data in /*) ;; *) data=$PWD/$data ;; esac; fi
python=${PYTHON:-python3}
case $python in /*) ;; */*) python=$PWD/$python ;; esac
case $benchmark in aime24) hub=Maxwell-Jia/AIME_2024 ;; aime25) hub=yentinglin/aime_2025 ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. recipe/dag/scripts/checks.sh
advice_on_packages="activate its environment, or set PYTHON"
need_packages "$python" aiohttp omegaconf pydantic

"$python" preprocess/aime.py --input "${data:-$hub}" --test_size all --local_dir "$out/data"

options=(--base-url "$base_url" --served-model "$model" --max-concurrent "$requests" --request-timeout "$request_timeout"
  --data "$out/data/test.parquet" --output "$out" -n "$samples" --seed "$seed")
[ -z "$problems" ] || options+=(--max-samples "$problems")
unset RETOOL_API_KEY
if [ -n "$key" ]; then
  options+=(--key-env RETOOL_API_KEY)
  export RETOOL_API_KEY=$key
fi
settings=("sandbox.timeout_s=$sandbox_timeout" "sandbox.max_concurrent=$programs")
case $sandbox_url in
  '' | local) ;;
  *)
    settings+=("sandbox.url='${sandbox_url//\'/\\\'}'")
    # shellcheck disable=SC2016  # the variable is read by the configuration, so that the token is in no command line
    [ -z "${SANDBOX_TOKEN:-}" ] || settings+=('sandbox.token=${oc.env:SANDBOX_TOKEN}') ;;
esac
# enough for every request and every program to reach its limit, and for a second try
limit=$(awk "BEGIN {print 2 * $max_turns * ($request_timeout + $sandbox_timeout)}")
agent=workflow.agents.solver
# masked: a request that the server refuses is an error of its episode, not the end of all others
exec "$python" -m recipe.dag.cli eval workflows/workflow_retool.yaml "${options[@]}" "${settings[@]}" \
  report.conversations_file=retool_results.json rollout.processes=1 "rollout.max_in_flight=$((requests + programs))" \
  "$agent.validation.temperature=$temperature" "$agent.validation.top_p=$top_p" "$agent.validation.top_k=$top_k" \
  "$agent.sampling.max_tokens=$max_tokens" "$agent.tool_loop.max_generations=$max_turns" \
  "workflow.episode.timeout_s=$limit" "workflow.episode.call_timeout_s=$limit" workflow.episode.on_user_error=mask \
  ${overrides[@]+"${overrides[@]}"}

# Source this file: find_algorithm sets `algorithm` to the settings that replace the workflow's grpo by $ALGORITHM.
find_algorithm() {
  local team=workflow.nodes.grade.reward=recipe/gsm8k/hooks.py:team_answers
  case ${ALGORITHM:-grpo} in
    grpo) algorithm=() ;;
    ippo | mappo) algorithm=("workflow.algorithm={estimator: $ALGORITHM}" 'workflow.policies.*.critic={}') ;;
    vdn | qmix) algorithm=("workflow.algorithm={estimator: $ALGORITHM}") ;;
    happo) algorithm=('workflow.algorithm.happo={}' "$team") ;;
    cory) algorithm=('workflow.algorithm.cory={roles: [solver, checker]}' "$team") ;;
    *) echo "error: ALGORITHM=$ALGORITHM: it must be grpo, ippo, mappo, vdn, qmix, happo or cory" >&2; exit 2 ;;
  esac
}

"""ReTool-MA's reward node, which scores every agent of a finished episode.

Invariant: an episode is graded once, before anything is set on it; if the grader fails, the fault is raised and the
episode stays ungraded. Each agent's rewards are a list with one value per call, in the order of its calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recipe.dag.core.errors import GraderFault, UserError
from recipe.dag.reward.gold import boxed_answer_is_right, earned_by
from recipe.dag.reward.outcome import answer_of, graded, ground_truth
from recipe.dag.types.record import Call, Episode
from recipe.retool_ma.plan import plan_of
from recipe.retool_ma.rewards import (
    Coefficients,
    coefficients,
    executor_reward,
    overlap,
    planner_reward,
    verifier_reward,
)

SOLVED = 0.5
"""The outcome from which an episode counts as solved."""


@dataclass(frozen=True, slots=True)
class Run:
    """One execution of the executor's code. The defaults describe a program that did not run."""

    success: bool = False
    code: str = ""
    stdout: str = ""


@earned_by(boxed_answer_is_right)
async def role_rewards(
    episode: Episode,
    *,
    planner: str = "plan",
    executor: str = "execute",
    verifier: str = "verify",
    grade_timeout_s: float = 10.0,
    **options: Any,
) -> dict[str, list[float]]:
    """Return agent name -> reward of each call. `planner`, `executor`, `verifier` are node ids, `options` the fields of
    `Coefficients`.

    A turn's plan and program are scored by that turn's run and divided by the number of turns, so that more turns do
    not pay more. Only the last review is scored, by the episode's outcome. Sets `episode.outcome` (1.0 or 0.0) and
    `episode.info`. Raises GraderFault if the answer cannot be graded; in compat mode the outcome is then -1 and the
    episode unsolved.
    """
    c = coefficients(options)
    truth = ground_truth(episode)
    plans, programs, reviews = (_calls_at(episode, node) for node in (planner, executor, verifier))
    runs = {call.turn: _run_of(call) for call in programs}
    plan_by_turn = {call.turn: plan_of(call) for call in plans}

    rewards: dict[int, float] = {}  # by id() of the call: calls are not hashable
    for call in plans:
        run, plan = runs.get(call.turn, Run()), plan_by_turn[call.turn]
        reward = planner_reward(c, success=run.success, expected=plan["expected_output"], stdout=run.stdout)
        rewards[id(call)] = reward / len(plans)
    for call in programs:
        run, plan = runs[call.turn], plan_by_turn.get(call.turn, {})
        reward = executor_reward(c, success=run.success, code_plan=plan.get("code_plan", ""), code=run.code)
        rewards[id(call)] = reward / len(programs)

    answer = answer_of(reviews[-1], compat=c.compat)
    outcome = await _outcome(answer, truth, c, grade_timeout_s)
    last_run = runs[programs[-1].turn]
    rewards[id(reviews[-1])] = verifier_reward(
        c, outcome=outcome, success=last_run.success, stdout=last_run.stdout, answer=answer, truth=truth
    )
    episode.outcome = float(outcome >= SOLVED)
    episode.info.update(
        final_reward=outcome,
        answer=answer or "",
        plan_parsed=float(bool(plans[-1].parsed.get("parsed_ok"))),
        plan_overlap=overlap(plan_of(plans[-1])["code_plan"], last_run.code),
    )
    agents = dict.fromkeys(call.agent for call in (*plans, *programs, *reviews))
    return {agent: [rewards.get(id(call), 0.0) for call in episode.calls_of(agent)] for agent in agents}


async def _outcome(answer: str | None, truth: str, c: Coefficients, timeout_s: float) -> float:
    try:
        return await graded(answer, truth, timeout_s)
    except GraderFault:
        if c.compat:
            return -1.0
        raise


def _calls_at(episode: Episode, node: str) -> list[Call]:
    calls = [call for call in episode.calls if call.node == node]
    if not calls:
        ran = ", ".join(dict.fromkeys(call.node for call in episode.calls)) or "none"
        raise UserError(
            f"role_rewards: node '{node}' has not run; nodes that have: {ran}; "
            "set planner, executor and verifier under `args` to the node ids"
        )
    return calls


def _run_of(call: Call) -> Run:
    if "failed" in call.parsed and not call.text:  # the call was skipped
        return Run()
    if "status" not in call.parsed:
        raise UserError(f"role_rewards: node '{call.node}' has no execution result; its hooks must be an Executor")
    return Run(call.parsed["status"] == "success", call.parsed["code"], call.parsed["stdout"])

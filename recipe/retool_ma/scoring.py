"""Reward nodes: what each agent of a finished episode earns.

Invariant: an episode is graded once, before anything is set on it; a grader that fails raises and leaves the episode
ungraded. Rewards are lists with one value per call of the agent, in the order of its calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipe.dag.episode.record import Call, Episode
from recipe.dag.errors import GraderFault, UserError
from recipe.dag.reward.answer import extract_answer
from recipe.dag.reward.grader import grade
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
    """One execution of the executor's code; the default is the run that never happened."""

    success: bool = False
    code: str = ""
    stdout: str = ""


async def role_rewards(
    episode: Episode,
    *,
    planner: str = "plan",
    executor: str = "execute",
    verifier: str = "verify",
    grade_timeout_s: float = 10.0,
    **options: Any,
) -> dict[str, list[float]]:
    """Agent name -> reward per call. `planner`, `executor`, `verifier` are node ids; `options` are `Coefficients`.

    Plans and programs are judged in each turn by that turn's run; the review by the episode's outcome, on the last one.
    Sets `episode.outcome` (1.0 or 0.0) and `episode.info`. Raises GraderFault if the answer cannot be graded; in compat
    mode the outcome is then -1 and the episode unsolved.
    """
    c = coefficients(options)
    truth = ground_truth(episode)
    plans, programs, reviews = (_calls_at(episode, node) for node in (planner, executor, verifier))
    runs = {call.turn: _run_of(call) for call in programs}
    plan_by_turn = {call.turn: plan_of(call) for call in plans}

    rewards: dict[int, float] = {}
    for call in plans:
        run, plan = runs.get(call.turn, Run()), plan_by_turn[call.turn]
        rewards[id(call)] = planner_reward(c, success=run.success, expected=plan["expected_output"], stdout=run.stdout)
    for call in programs:
        run, plan = runs[call.turn], plan_by_turn.get(call.turn, {})
        rewards[id(call)] = executor_reward(c, success=run.success, code_plan=plan.get("code_plan", ""), code=run.code)

    answer = answer_of(reviews[-1])
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


async def outcome_reward(
    episode: Episode, *, agent: str = "solver", grade_timeout_s: float = 10.0
) -> dict[str, list[float]]:
    """1 for a right answer, 0 for a wrong one, on the last call of `agent`; for the single-agent baselines.

    Sets `episode.outcome` and `episode.info`. Raises GraderFault if the answer cannot be graded.
    """
    calls = episode.calls_of(agent)
    if not calls:
        names = ", ".join(dict.fromkeys(call.agent for call in episode.calls)) or "none"
        raise UserError(
            f"outcome_reward: agent '{agent}' made no call; agents that did: {names}; set executable_kwargs.agent"
        )
    answer = answer_of(calls[-1])
    outcome = await _outcome(answer, ground_truth(episode), Coefficients(), grade_timeout_s)
    episode.outcome = outcome
    episode.info.update(final_reward=outcome, answer=answer or "")
    return {agent: [0.0] * (len(calls) - 1) + [outcome]}


def team_reward(
    episode: Episode, *, weight: float = 0.5, agents: Sequence[str] | None = None
) -> dict[str, list[float]]:
    """`weight` times the episode's outcome on every call of `agents` (all that moved where None).

    A reward node of its own, after the one that grades: the published role rewards pay a planner and an executor for
    any program that runs, right or wrong."""
    if episode.outcome is None:
        raise UserError("team_reward: the episode is not graded yet; make this node depend on the node that grades")
    moved = dict.fromkeys(call.agent for call in episode.calls)
    unknown = [name for name in agents or () if name not in moved]
    if unknown:
        raise UserError(f"team_reward: agent '{unknown[0]}' made no call; agents that did: {', '.join(moved)}")
    return {name: [weight * episode.outcome] * len(episode.calls_of(name)) for name in agents or moved}


def ground_truth(episode: Episode) -> str:
    truth = episode.sample.get("ground_truth")
    if truth is None:
        raise UserError(f"sample {episode.uid}: no ground_truth; the data needs reward_model.ground_truth")
    return str(truth)


def answer_of(call: Call) -> str | None:
    """What the hook found, or what stands in the text of an agent whose hook looks for no answer."""
    answer = call.parsed["answer"] if "answer" in call.parsed else extract_answer(call.text)
    return None if answer is None else str(answer)


async def _outcome(answer: str | None, truth: str, c: Coefficients, timeout_s: float) -> float:
    if answer is None:
        return 0.0
    try:
        return float(await grade(answer, truth, timeout_s=timeout_s))
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
            "set executable_kwargs planner, executor and verifier to the node ids"
        )
    return calls


def _run_of(call: Call) -> Run:
    if "status" not in call.parsed:
        raise UserError(f"role_rewards: node '{call.node}' did not say how its code ran; its hook must be an Executor")
    return Run(call.parsed["status"] == "success", call.parsed["code"], call.parsed["stdout"])

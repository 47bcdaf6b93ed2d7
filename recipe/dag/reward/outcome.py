"""Reward nodes for any workflow: grading an episode, and paying agents for its outcome.

Invariant: an episode is graded once, before anything is set on it; a failing grader raises and leaves the episode
ungraded. An outcome is one number per agent; the estimator assigns credit to its calls.
"""

from __future__ import annotations

from typing import Literal

from recipe.dag.core.errors import UserError
from recipe.dag.reward.answer import extract_answer
from recipe.dag.reward.gold import boxed_answer_is_right, earned_by
from recipe.dag.reward.grader import grade
from recipe.dag.types.markup import after_thinking
from recipe.dag.types.record import Call, Episode
from recipe.dag.types.reward import AgentNames, Catalogued


@earned_by(boxed_answer_is_right)
async def outcome_reward(
    episode: Episode, *, agent: str = "solver", grade_timeout_s: float = 10.0, compat: bool = False
) -> dict[str, float]:
    """Return 1 if the last answer of `agent` is right, 0 if it is wrong or missing; for the single-agent baselines.

    `compat`: if the agent's hook extracts no answer, take the last number in the text (the published behaviour).
    Sets `episode.outcome` and `episode.info`. Raises GraderFault if the answer cannot be graded.
    """
    answer = answer_of(last_call(episode, "agent", agent, "outcome_reward", "agent"), compat=compat)
    outcome = await graded(answer, ground_truth(episode), grade_timeout_s)
    episode.outcome = outcome
    episode.info.update(final_reward=outcome, answer=answer or "")
    return {agent: outcome}


@Catalogued("the episode's outcome", "an outcome per episode", copies=True, graded=True)
def team_reward(episode: Episode, *, weight: float = 0.5, agents: AgentNames | None = None) -> dict[str, float]:
    """Return `weight` times the episode's outcome for each of `agents` (None: all agents with a call).

    A separate reward node after the one that grades: the published role rewards pay a planner and an executor for any
    program that runs, right or wrong.
    """
    if episode.outcome is None:
        raise UserError("team_reward: the episode is not graded yet; make this node depend on the node that grades")
    called = dict.fromkeys(call.agent for call in episode.calls)
    unknown = [name for name in agents or () if name not in called]
    if unknown:
        raise UserError(f"team_reward: agent '{unknown[0]}' made no call; agents that did: {', '.join(called)}")
    return {name: weight * episode.outcome for name in agents or called}


def env_outcome(episode: Episode, *, solved_at: float = 1.0) -> dict[str, float]:
    """Set the outcome of an episode whose env pays the rewards: 1.0 if the last reward is at least `solved_at`, else
    0.0. Adds no reward."""
    reward = episode.calls[-1].reward if episode.calls else None
    if reward is None:
        raise UserError("env_outcome: the last call has no reward; set `env_pays: true` on the node with `env`")
    episode.outcome = float(reward >= solved_at)
    episode.info["final_reward"] = reward
    return {}


def ground_truth(episode: Episode) -> str:
    """Return the ground truth of the episode's sample. Raises UserError if it has none."""
    truth = episode.sample.get("ground_truth")
    if truth is None:
        raise UserError(f"sample {episode.uid}: no ground_truth; add reward_model.ground_truth to the data")
    return str(truth)


def last_call(episode: Episode, kind: Literal["agent", "node"], name: str, function: str, option: str) -> Call:
    """Return the last call of an agent or a node, which `option` of the reward `function` names. Raises UserError if
    there is none."""
    calls = {getattr(call, kind): call for call in episode.calls}
    if name not in calls:
        callers = ", ".join(calls) or "none"
        raise UserError(f"{function}: {kind} '{name}' made no call; {kind}s that did: {callers}; set args.{option}")
    return calls[name]


def written_in(call: Call) -> str:
    """Return the model's last completion without its thoughts; never a tool's output."""
    text = call.text if call.completion is None else call.completion
    return after_thinking(text, opened=call.opened_thinking)


def final_answer(call: Call, *, compat: bool = False, tagged: bool = False) -> str | None:
    """Return the answer in the required format (see `extract_answer`). None if there is none, if a limit ended the call
    in a tool call, or if the text was cut off before the answer was complete.

    `compat`: take the last number in the last completion (the published behaviour).
    """
    if compat:
        return extract_answer(written_in(call), strict=False)
    if call.ended_in_tool_call:
        return None
    return extract_answer(written_in(call), complete=call.stop_reason != "length", tagged=tagged)


def answer_of(call: Call, *, compat: bool = False) -> str | None:
    """Return the answer that the agent's hook extracted, or the one in its text if the hook extracts none."""
    answer = call.parsed["answer"] if "answer" in call.parsed else final_answer(call, compat=compat)
    return None if answer is None else str(answer)


async def graded(answer: str | None, truth: str, timeout_s: float) -> float:
    """Return 1.0 for a right answer, 0.0 for a wrong or missing one. Raises GraderFault."""
    return 0.0 if answer is None else float(await grade(answer, truth, timeout_s=timeout_s))

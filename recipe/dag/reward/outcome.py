"""Reward nodes that any workflow can use: was the episode solved, and who is paid for it.

Invariant: an episode is graded once, before anything is set on it; a grader that fails raises and leaves the episode
ungraded. An outcome is one number per agent: what each of its calls is worth of it is the estimator's to say.
"""

from __future__ import annotations

from collections.abc import Sequence

from recipe.dag.episode.markup import after_thinking
from recipe.dag.episode.record import Call, Episode
from recipe.dag.errors import UserError
from recipe.dag.reward.answer import extract_answer
from recipe.dag.reward.gold import boxed_answer_is_right, earned_by
from recipe.dag.reward.grader import grade


@earned_by(boxed_answer_is_right)
async def outcome_reward(
    episode: Episode, *, agent: str = "solver", grade_timeout_s: float = 10.0, compat: bool = False
) -> dict[str, float]:
    """Return 1 for a right answer of `agent`, 0 for a wrong one or none; for the single-agent baselines.
    `compat`: where the agent's hook looks for no answer, take the last number of any text, as was published.

    Sets `episode.outcome` and `episode.info`. Raises GraderFault if the answer cannot be graded.
    """
    calls = episode.calls_of(agent)
    if not calls:
        names = ", ".join(dict.fromkeys(call.agent for call in episode.calls)) or "none"
        raise UserError(
            f"outcome_reward: agent '{agent}' made no call; agents that did: {names}; set executable_kwargs.agent"
        )
    answer = answer_of(calls[-1], compat=compat)
    outcome = await graded(answer, ground_truth(episode), grade_timeout_s)
    episode.outcome = outcome
    episode.info.update(final_reward=outcome, answer=answer or "")
    return {agent: outcome}


def team_reward(episode: Episode, *, weight: float = 0.5, agents: Sequence[str] | None = None) -> dict[str, float]:
    """Return `weight` times the episode's outcome for each of `agents` (all that moved where None).

    A reward node of its own, after the one that grades: the published role rewards pay a planner and an executor for
    any program that runs, right or wrong."""
    if episode.outcome is None:
        raise UserError("team_reward: the episode is not graded yet; make this node depend on the node that grades")
    moved = dict.fromkeys(call.agent for call in episode.calls)
    unknown = [name for name in agents or () if name not in moved]
    if unknown:
        raise UserError(f"team_reward: agent '{unknown[0]}' made no call; agents that did: {', '.join(moved)}")
    return {name: weight * episode.outcome for name in agents or moved}


def env_outcome(episode: Episode, *, solved_at: float = 1.0) -> dict[str, float]:
    """For the REWARD node of a workflow whose env rewards: the episode is solved (`outcome` 1.0) if the last reward is
    at least `solved_at`. Adds no reward of its own."""
    reward = episode.calls[-1].reward if episode.calls else None
    if reward is None:
        raise UserError(
            "env_outcome: the last call has no reward; set rewards_with_env: true on the node with env_path"
        )
    episode.outcome = float(reward >= solved_at)
    episode.info["final_reward"] = reward
    return {}


def ground_truth(episode: Episode) -> str:
    truth = episode.sample.get("ground_truth")
    if truth is None:
        raise UserError(f"sample {episode.uid}: no ground_truth; the data needs reward_model.ground_truth")
    return str(truth)


def written_in(call: Call) -> str:
    """Return what the model wrote last, without its thoughts; a tool's output is never part of it."""
    text = call.text if call.completion is None else call.completion
    return after_thinking(text, opened=call.opened_thinking)


def final_answer(call: Call, *, compat: bool = False, tagged: bool = False) -> str | None:
    r"""Return the answer that the model gave in the format asked for (see `extract_answer`), or None: there is none
    where a limit ended the call in a tool call, or cut it off before an answer was complete.

    `compat`: the published behaviour, which takes the last number of whatever was written last.
    """
    if compat:
        return extract_answer(written_in(call), strict=False)
    if call.ended_in_tool_call:
        return None
    return extract_answer(written_in(call), complete=call.stop_reason != "length", tagged=tagged)


def answer_of(call: Call, *, compat: bool = False) -> str | None:
    """Return the answer that the agent's hook read, or the one in its text where the hook looks for none."""
    answer = call.parsed["answer"] if "answer" in call.parsed else final_answer(call, compat=compat)
    return None if answer is None else str(answer)


async def graded(answer: str | None, truth: str, timeout_s: float) -> float:
    """1.0 right, 0.0 wrong or none. Raises GraderFault."""
    return 0.0 if answer is None else float(await grade(answer, truth, timeout_s=timeout_s))

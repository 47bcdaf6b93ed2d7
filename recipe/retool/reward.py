"""The ReTool reward: 1 for a right answer, -1 for a wrong or missing one.

Invariant: a wrong answer never earns as much as a right one, whatever the options. Accuracy (1 or 0) is
`episode.outcome`, which is logged apart and never trained on. An answer that cannot be graded is a fault, no reward.
"""

from __future__ import annotations

from recipe.dag import Call, Episode, UserError
from recipe.dag.reward.gold import boxed_answer_is_right, earned_by
from recipe.dag.reward.outcome import answer_of, graded, ground_truth, last_call

RIGHT, WRONG = 1.0, -1.0


@earned_by(boxed_answer_is_right)
async def retool_reward(
    episode: Episode,
    *,
    agent: str = "solver",
    floor: float | None = None,
    turn_bonus: float = 0.1,
    compat: bool = False,
    grade_timeout_s: float = 10.0,
) -> dict[str, float]:
    """Return the reward of `agent` by its last call's answer, and set `episode.outcome` to 1.0 or 0.0.

    floor: None pays -1 for every wrong answer. A number lets a wrong answer gain `turn_bonus` for each different
        program that ran without an error, up to this value: -0.6 as in verl's recipe, 0 as in the 7B recipe.
    compat: count every tool call for the bonus, failed and repeated ones too (the published behaviour).

    Raises GraderFault if the answer cannot be graded, UserError for options that cannot work.
    """
    _check(floor, turn_bonus)
    last = last_call(episode, "agent", agent, "retool_reward", "agent")
    answer = answer_of(last)
    outcome = await graded(answer, ground_truth(episode), grade_timeout_s)
    reward = RIGHT if outcome else wrong_reward(paid_calls(last, compat=compat), floor, turn_bonus)
    episode.outcome = outcome
    episode.info.update(final_reward=reward, answer=answer or "")
    return {agent: reward}


def wrong_reward(paid: int, floor: float | None, turn_bonus: float) -> float:
    """Return the reward of a wrong answer after `paid` tool calls that count for the bonus."""
    return WRONG if floor is None else min(floor, WRONG + turn_bonus * paid)


def paid_calls(call: Call, *, compat: bool) -> int:
    """Return the number of tool calls that count: different programs that ran; with `compat`, all calls."""
    if compat:
        return len(call.tool_results)
    return len({repr(sorted(result.arguments.items())) for result in call.tool_results if result.ok})


def _check(floor: float | None, turn_bonus: float) -> None:
    if floor is not None and not WRONG <= floor <= 0:
        raise UserError(f"retool_reward: floor is {floor}; write a number from -1 to 0, or null for no bonus")
    if turn_bonus < 0:
        raise UserError(f"retool_reward: turn_bonus is {turn_bonus}; write 0 or more")

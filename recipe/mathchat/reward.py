"""The outcome of a MathChat episode by rule, beside the coach's opinion of it.

Invariant: accuracy (`episode.outcome`) is the rule grader's alone. An answer that cannot be graded is a fault, no
reward.
"""

from __future__ import annotations

from recipe.dag import Episode
from recipe.dag.reward.gold import boxed_answer_is_right, earned_by
from recipe.dag.reward.outcome import answer_of, graded, ground_truth, last_call


@earned_by(boxed_answer_is_right)
async def answer_outcome(
    episode: Episode,
    *,
    verifier: str = "verify",
    coach: str | None = "coach_verify",
    agents: tuple[str, ...] = ("solver", "coder", "verifier"),
    weight: float = 1.0,
    grade_timeout_s: float = 10.0,
) -> dict[str, list[float]]:
    """Return `weight` for each call of `agents` if the last answer of the node `verifier` is right, else 0.0.

    With `stat_unit: call` a reward reaches no other action: agents that are not named learn from the coach alone.
    Sets `episode.outcome` and, if the node `coach` gave an ANSWER_CORRECT, `episode.info`: `coach_correct`, and
    `coach_agrees`, 1.0 if it is the grader's. Raises GraderFault if the answer cannot be graded.
    """
    answer = answer_of(last_call(episode, "node", verifier, "answer_outcome", "verifier"))
    outcome = await graded(answer, ground_truth(episode), grade_timeout_s)
    episode.outcome = outcome
    episode.info.update(final_reward=outcome, answer=answer or "")
    opinion = next((call.parsed.get("outcome") for call in reversed(episode.calls) if call.node == coach), None)
    if opinion is not None:
        episode.info |= {"coach_correct": opinion, "coach_agrees": float(opinion == outcome)}
    return {agent: [weight * outcome] * len(episode.calls_of(agent)) for agent in agents}

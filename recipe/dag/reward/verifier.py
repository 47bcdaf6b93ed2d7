"""The reward of a problem that reasoning-gym made: its own verifier's score.

Invariant: the verifier reads the model's text in a process that evaluates none of it and is killed when it exceeds its
time limit. A text on which two processes are lost scores 0, see grader.py. preprocess/reasoning_gym.py writes the rows.
"""

from __future__ import annotations

import sys
from pathlib import Path

from recipe.dag.core.errors import UserError
from recipe.dag.reward.grader import SharedPool, Undecided
from recipe.dag.reward.outcome import final_answer
from recipe.dag.types.record import Episode

KEY = "reasoning_gym"
"""Key of a sample's extra_info: {generator, options, entry}, the last two in `entry_json`'s form."""
_MAX_CHARS = 20_000
_SOLVED = 1.0 - 1e-6


async def verifier_reward(
    episode: Episode, *, agent: str = "solver", partial_credit: bool = False, grade_timeout_s: float = 10.0
) -> dict[str, float]:
    """Return 1 if the verifier gives full marks to the last answer of `agent`, else 0, or its score (0 to 1) with
    `partial_credit`; many verifiers give a little for a text that has the right form.

    The answer is what the agent's hook extracted, else the content of <answer>...</answer> or \\boxed{...}. Sets
    `episode.outcome` and `episode.info`. Raises GraderFault if the answer cannot be scored, UserError for a sample
    of another kind.
    """
    calls, problem = episode.calls_of(agent), (episode.sample.get("extra_info") or {}).get(KEY)
    if not calls:
        raise UserError(f"verifier_reward: agent '{agent}' made no call; set args.agent")
    if not isinstance(problem, dict):
        raise UserError(f"verifier_reward: the sample has no extra_info.{KEY}; preprocess/reasoning_gym.py writes it")
    call = calls[-1]
    answer = call.parsed["answer"] if "answer" in call.parsed else final_answer(call, tagged=True)
    score = 0.0 if answer is None else await scored(problem, str(answer), grade_timeout_s)
    episode.outcome = float(score >= _SOLVED)
    episode.info.update(final_reward=score if partial_credit else episode.outcome, answer=answer or "")
    return {agent: episode.info["final_reward"]}


async def scored(problem: dict[str, str], answer: str, timeout_s: float = 10.0) -> float:
    """Return the verifier's score of an answer, from 0 to 1; 0 for a text on which it does not end. Raises
    GraderFault."""
    if len(answer) > _MAX_CHARS:
        return 0.0
    try:
        return (await _shared_pool().ask({**problem, "prediction": answer}, timeout_s))["score"]
    except Undecided:
        return 0.0


_shared_pool = SharedPool(command=(sys.executable, "-P", str(Path(__file__).with_name("verifier_worker.py"))))

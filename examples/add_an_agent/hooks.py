"""A critic for ReTool-MA: it judges the plan while the executor works, and the verifier reads its critique.

Invariant: agents are stateless; all they know comes from `context`.
"""

from __future__ import annotations

import re

from recipe.retool_ma.hooks import Verifier
from verl_dag import Agent, Context, Episode, Message, Output, UserError

PROMPT = """\
Someone plans to solve a problem with a Python program. Judge the plan.

Problem:
{problem}

Plan:
{plan}

Name what is wrong or missing in it, in a few sentences. Finish with one of these lines:
VERDICT: good
VERDICT: bad"""

_VERDICT = re.compile(r"VERDICT:\s*(good|bad)", re.IGNORECASE)


class Critic(Agent):
    """Judges the plan."""

    def prompt(self, context: Context, *, planner: str = "plan") -> list[Message]:
        if planner not in context.upstream:
            raise UserError(f"node '{context.node}': the critic reads node '{planner}'; add `after: {planner}`")
        plan = context.upstream[planner].text
        return [{"role": "user", "content": PROMPT.replace("{problem}", context.problem).replace("{plan}", plan)}]

    def parse(self, context: Context) -> Output:
        """Return whether the critic approves: `approves` is True, False, or None without a verdict."""
        verdicts = _VERDICT.findall(context.call.text)
        approves = verdicts[-1].lower() == "good" if verdicts else None
        return Output(parsed={"approves": approves})


class VerifierWithCritique(Verifier):
    """ReTool-MA's verifier, which also reads the critique."""

    def prompt(self, context: Context, *, critic: str = "criticize") -> list[Message]:
        messages = super().prompt(context)
        critique = context.upstream[critic].text
        *before, last = messages
        return [*before, {**last, "content": f"A critic said of the plan below:\n{critique}\n\n{last['content']}"}]


def critic_reward(episode: Episode, *, critic: str = "critic", bonus: float = 0.5) -> dict[str, list[float]]:
    """Return `bonus` for each verdict that agrees with the outcome, `-bonus` for each that does not, 0 without one.

    Used by a reward node after the one that grades.
    """
    if episode.outcome is None:
        raise UserError("critic_reward: the episode is not graded yet; make this node depend on the node that grades")
    solved = episode.outcome >= 0.5
    rewards = []
    for call in episode.calls_of(critic):
        approves = call.parsed.get("approves")
        if approves is None:
            rewards.append(0.0)
        else:
            rewards.append(bonus if approves == solved else -bonus)
    return {critic: rewards}

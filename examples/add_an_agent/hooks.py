"""A critic for ReTool-MA: it reads the plan while the executor works, and the verifier reads it.

Invariant: an agent keeps nothing of an episode; what it knows comes from `context`.
"""

from __future__ import annotations

import re

from recipe.dag import Agent, Context, Episode, Message, Output, UserError
from recipe.retool_ma.hooks import Verifier

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
    def prompt(self, context: Context, *, planner: str = "plan") -> list[Message]:
        if planner not in context.upstream:
            raise UserError(f"node '{context.node}': the critic needs node '{planner}' among its dependencies")
        plan = context.upstream[planner].text
        return [{"role": "user", "content": PROMPT.replace("{problem}", context.problem).replace("{plan}", plan)}]

    def parse(self, context: Context) -> Output:
        """`approves` is None where there is no verdict."""
        verdicts = _VERDICT.findall(context.call.text)
        return Output(parsed={"approves": verdicts[-1].lower() == "good" if verdicts else None})


class VerifierWithCritique(Verifier):
    """ReTool-MA's verifier, which also sees what the critic said."""

    def prompt(self, context: Context, *, critic: str = "criticize") -> list[Message]:
        messages = super().prompt(context)
        critique = context.upstream[critic].text
        *before, last = messages
        return [*before, {**last, "content": f"A critic said of the plan below:\n{critique}\n\n{last['content']}"}]


def critic_reward(episode: Episode, *, critic: str = "critic", bonus: float = 0.5) -> dict[str, list[float]]:
    """`bonus` for a verdict that the outcome bears out, its negative for one that it does not, 0 for none.

    A node of its own, after the node that grades.
    """
    if episode.outcome is None:
        raise UserError("critic_reward: the episode is not graded yet; make this node depend on the node that grades")
    solved = episode.outcome >= 0.5
    verdicts = [call.parsed.get("approves") for call in episode.calls_of(critic)]
    return {critic: [0.0 if verdict is None else bonus if verdict == solved else -bonus for verdict in verdicts]}

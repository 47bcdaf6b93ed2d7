"""Vote and compute nodes, which run between the agents without a model.

Invariant: the result is an Output that a record can hold, or a HookFault that names the function. It depends on the
context alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

from recipe.dag.core.errors import HookFault, boundary, described
from recipe.dag.core.tasks import invoke, limited
from recipe.dag.credit.vote import majority
from recipe.dag.episode.graph import EpisodeNode
from recipe.dag.episode.hooks import checked
from recipe.dag.types.context import Context, Output
from recipe.dag.types.convention import COMPUTE
from recipe.dag.types.values import normalized
from recipe.dag.workflow.node import Kind, Vote
from recipe.dag.workflow.schema import Workflow


@dataclass(frozen=True, slots=True)
class VoteRunner:
    """Runs a vote node: elects among the parsed answers of its dependencies."""

    node: EpisodeNode
    vote: Vote

    async def run(self, context: Context) -> Output:
        """Return the elected answer (see `elect`)."""
        outputs = {**context.upstream, **context.results}
        key = self.vote.key
        answers = [outputs[name].parsed.get(key) for name in self.node.after if name in outputs]
        return elect(answers, key, self.vote.ties)


@dataclass(frozen=True, slots=True)
class FunctionRunner:
    """Runs a compute node. `function(context, **kwargs)`, sync (run in a thread) or async, returns an Output, its text,
    or a dict for its `parsed`."""

    node: EpisodeNode
    where: str
    function: Callable[..., Any]
    limit_s: float

    async def run(self, context: Context) -> Output:
        """Return the checked result. Raises HookFault, also if the function takes longer than `limit_s`."""
        with boundary(HookFault, self.where, self.function):
            async with limited(self.limit_s, HookFault, "the function", self.where):
                result = await invoke(self.function, context, **deepcopy(self.node.spec.args))
            if isinstance(result, str):
                result = Output(text=result)
            elif isinstance(result, dict):
                result = Output(parsed=result)
            elif not isinstance(result, Output):
                raise HookFault(f"returned {described(result)}, not an Output, a str or a dict", where=self.where)
            output = checked(result)
        # A copy: the function may keep the dict and change it in a later call.
        return Output(output.text or "", deepcopy(output.parsed), output.done)


def load_compute(node: EpisodeNode, workflow: Workflow) -> VoteRunner | FunctionRunner:
    """Return the runner of a vote or compute node. Raises UserError."""
    spec = node.spec
    if spec.kind is Kind.VOTE:
        return VoteRunner(node, spec.vote or Vote())
    assert spec.compute is not None, node.id
    where, limit_s = f"node {node.id}", workflow.episode.call_timeout_s
    function = COMPUTE.load(spec.compute, workflow.path, where, spec.args)
    return FunctionRunner(node, f"{where}: {spec.compute}", function, limit_s)


def elect(answers: Sequence[Any], key: str, ties: Literal["first", "none"]) -> Output:
    """Return the most frequent answer as `parsed = {key: winner, share, votes}` and its normal form as text.

    An answer of None abstains. The winner has the form in which it occurs first; it is None without votes, or after a
    tie if `ties` is none. With `ties` first, the earliest answer wins a tie. `share` is the winner's fraction of the
    votes cast (0.0 without a winner), `votes` the count of each normal form, the most frequent first.
    """
    forms = [None if answer is None else normalized(answer) for answer in answers]
    votes = dict(Counter(form for form in forms if form is not None).most_common())  # ties keep their order
    winner = majority(forms, ties)
    if not isinstance(winner, str):  # None: no winner
        return Output(text="", parsed={key: None, "share": 0.0, "votes": votes})
    share = votes[winner] / sum(votes.values())
    return Output(text=winner, parsed={key: answers[forms.index(winner)], "share": share, "votes": votes})

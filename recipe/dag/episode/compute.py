"""Vote and compute nodes: what runs between the agents without a model.

Invariant: a result is an Output that a record can hold, or a HookFault that names the function. A node's result depends
on what the context shows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from recipe.dag.episode.answers import majority
from recipe.dag.episode.context import Context, Output
from recipe.dag.episode.graph import EpisodeNode
from recipe.dag.episode.hooks import checked
from recipe.dag.episode.tasks import invoke, limited
from recipe.dag.errors import HookFault, UserError, boundary, described
from recipe.dag.workflow.schema import NodeRole, Vote, Workflow
from recipe.dag.workflow.user_code import load_function


@dataclass(frozen=True, slots=True)
class Ballot:
    """A vote node: the majority of what its dependencies parsed."""

    place: EpisodeNode
    vote: Vote

    async def run(self, context: Context) -> Output:
        said = {**context.upstream, **context.results}
        key = self.vote.key
        answers = [said[name].parsed.get(key) for name in self.place.dependencies if name in said]
        return majority(answers, key, self.vote.ties)


@dataclass(frozen=True, slots=True)
class Computation:
    """A compute node: `function(context, **kwargs)`, sync (run in a thread) or async, returns an Output, its text, or a
    dict as its `parsed`."""

    place: EpisodeNode
    where: str
    function: Callable[..., Any]
    limit_s: float

    async def run(self, context: Context) -> Output:
        """Raises HookFault, also when it takes longer than `limit_s`."""
        with boundary(HookFault, self.where, self.function):
            async with limited(self.limit_s, HookFault, "the function", self.where):
                found = await invoke(self.function, context, **deepcopy(self.place.node.executable_kwargs))
            if isinstance(found, str):
                found = Output(text=found)
            elif isinstance(found, dict):
                found = Output(parsed=found)
            elif not isinstance(found, Output):
                raise HookFault(f"returned {described(found)}, not an Output, a str or a dict", where=self.where)
            output = checked(found, self.where)
        return Output(output.text or "", deepcopy(output.parsed), output.done)


def load_compute(place: EpisodeNode, workflow: Workflow) -> Ballot | Computation:
    """Raises UserError."""
    node = place.node
    if node.node_role is NodeRole.VOTE:
        return Ballot(place, node.vote or Vote())
    if node.executable_ref is None:
        raise UserError(f"node {node.node_id}: a DEFAULT node needs `executable_ref: file.py:function`")
    function = load_function(node.executable_ref, workflow.path, node.node_id)
    where = f"node {node.node_id}: {node.executable_ref}"
    return Computation(place, where, function, workflow.episode.call_timeout_s)

"""Chooses among the candidates of a node.

Invariant: the choice is a function of the scores alone. A candidate without a score is kept only if none has one; of
equal scores, the first counts. A fault while scoring is a fault of the episode, never a score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from recipe.dag.episode.tasks import invoke, limited
from recipe.dag.errors import HookFault, boundary, described
from recipe.dag.types.context import Context
from recipe.dag.types.values import as_number
from recipe.dag.user_code import load_function
from recipe.dag.workflow.schema import Candidates, Workflow


@dataclass(frozen=True, slots=True)
class Choice:
    """How the candidates of a node are scored and chosen."""

    spec: Candidates
    where: str
    limit_s: float
    function: Callable[..., Any] | None
    """`function(context, **args) -> float | None`; None if a node scores."""

    @property
    def judge(self) -> str | None:
        """The node that scores."""
        return self.spec.by if self.function is None else None

    def count(self, *, validate: bool) -> int:
        """Return the number of candidates."""
        return self.spec.validation_k if validate and self.spec.validation_k is not None else self.spec.k

    async def score(self, context: Context) -> float | None:
        """Return the function's score of the candidate `context.call`. Raises HookFault."""
        assert self.function is not None
        with boundary(HookFault, self.where, self.function):
            async with limited(self.limit_s, HookFault, "the function", self.where):
                value = await invoke(self.function, context, **deepcopy(self.spec.args))
            return self._number(value)

    def verdict(self, parsed: Mapping[str, Any]) -> float | None:
        """Return the score in the `parsed` of the node that judged a candidate; None without one. Raises HookFault."""
        return self._number(parsed.get(self.spec.key))

    def best(self, scores: Sequence[float | None]) -> int:
        """Return the index of the candidate that is kept."""
        known = [index for index, score in enumerate(scores) if score is not None]
        if self.spec.keep == "first" or not known:
            return 0
        return max(known, key=lambda index: (scores[index], -index))

    def _number(self, value: Any) -> float | None:
        if value is None:
            return None
        number = as_number(value)
        if number is None or isinstance(value, bool):
            raise HookFault(f"gave the score {described(value)}; give a finite number, or None", where=self.where)
        return number


def load_choices(workflow: Workflow) -> dict[str, Choice]:
    """Return the choice of each node with candidates. Raises UserError."""
    choices = {}
    for node in workflow.rollout_nodes:
        spec = node.candidates
        if spec is None:
            continue
        function = load_function(spec.by, workflow.path, node.node_id) if ":" in spec.by else None
        where = f"node {node.node_id}: candidates.by {spec.by}"
        choices[node.node_id] = Choice(spec, where, workflow.episode.call_timeout_s, function)
    return choices

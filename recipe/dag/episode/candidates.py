"""Runs the candidates of a node and chooses among them.

Invariant: candidates answer one prompt, token by token, and none of them affects another. The choice is a function of
the scores alone: a candidate without a score is kept only if none has one, and of equal scores the first counts. A
fault while scoring is a fault of the episode, never a score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from recipe.dag.core.errors import HookFault, SkipCall, boundary, described
from recipe.dag.core.tasks import invoke, limited, together
from recipe.dag.episode.agent_runner import AgentRunner
from recipe.dag.episode.attempt import Attempt
from recipe.dag.types.context import Context, Output
from recipe.dag.types.convention import COMPUTE
from recipe.dag.types.record import PROMPT_TEXT, Call
from recipe.dag.types.values import as_number, plain_copy
from recipe.dag.workflow.node import Candidates
from recipe.dag.workflow.schema import Workflow


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


async def run_candidates(
    runner: AgentRunner, calls: Sequence[Call], contexts: Sequence[Context], attempt: Attempt
) -> list[Output]:
    """Fill in several calls that answer one prompt, each with its own seed and results of tools. Raises Faults, as
    `AgentRunner.run` does."""
    first, *others = calls
    async with runner.timed(first, attempt):
        try:
            conversation = await runner.prompt(first, contexts[0], attempt)
        except SkipCall as skip:
            raise HookFault(f"skips its call ({skip}), but its node has candidates", where=skip.where) from skip
    for call, context in zip(others, contexts[1:], strict=True):
        _copy_prompt(first, call)
        context.continued = contexts[0].continued

    async def answer(call: Call, context: Context) -> Output:
        async with runner.timed(call, attempt) as limit:
            return await runner.finish(call, context, attempt, limit, conversation)

    return await together(map(answer, calls, contexts))


def _copy_prompt(source: Call, call: Call) -> None:
    """Give a call the prompt of its sibling, and what the prompt's hook did."""
    call.observation, call.start_seconds = source.observation, source.start_seconds
    call.prompt_ids, call.messages = list(source.prompt_ids), plain_copy(source.messages)
    call.asked = list(source.asked)
    call.tool_results = list(source.tool_results)
    PROMPT_TEXT.defer(call, PROMPT_TEXT.raw(source))


def load_choices(workflow: Workflow) -> dict[str, Choice]:
    """Return the choice of each node with candidates. Raises UserError."""
    choices = {}
    for node in workflow.rollout_nodes:
        spec = node.candidates
        if spec is None:
            continue
        where, function = f"node {node.id}: candidates.by", None
        if ":" in spec.by:
            function = COMPUTE.load(spec.by, workflow.path, where, spec.args)
        choices[node.id] = Choice(spec, f"{where} {spec.by}", workflow.episode.call_timeout_s, function)
    return choices

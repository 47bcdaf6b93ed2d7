"""Log-probs of given answers by a policy's inference servers.

Invariant: the servers have the weights that play, and nothing is sampled, so that asking changes no figure of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipe.dag.core.tasks import together
from recipe.dag.endpoint.chat import end_of_turn_id, render
from recipe.dag.policy.canary import ask
from recipe.dag.policy.policy import PolicyRuntime
from recipe.dag.types.context import Message


class ServerScorer:
    """The `Scorer` of a started policy."""

    def __init__(self, policy: PolicyRuntime):
        self._policy = policy

    async def log_probs(
        self, messages: Sequence[Message], answers: Sequence[str], *, template: Mapping[str, Any] | None = None
    ) -> list[float]:
        tokenizer, template = self._policy.tokenizer, template or {}
        prompt, end = render(tokenizer, messages, **template), end_of_turn_id(tokenizer, **template)
        encoded = [[*tokenizer.encode(answer, add_special_tokens=False), end] for answer in answers]
        return await together(self._sum(prompt, ids, number) for number, ids in enumerate(encoded))

    async def _sum(self, prompt: list[int], answer: list[int], number: int) -> float:
        replicas = self._policy.replicas
        server = replicas[number % len(replicas)].server_handle
        asked = await ask(server, [*prompt, *answer], adapter=self._policy.adapter)
        return sum(asked.log_probs[-len(answer) :])

"""Requests one generation from a policy's server, with checks and retries.

Invariant: a returned generation has a finite log-prob for each token and at most the requested number of tokens. A
server that fails, hangs or returns an invalid answer is asked again with the same seed, a bounded number of times.
"""

from __future__ import annotations

import asyncio
import bisect
import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

from recipe.dag.core.errors import ModelServerFault, boundary
from recipe.dag.core.tasks import limited
from recipe.dag.endpoint.chat import plain_ids
from recipe.dag.endpoint.client import GenerationClient
from recipe.dag.types.record import Generation
from recipe.dag.workflow.agent_schema import Agent

TRIES = 3
BACKOFF_S = 0.1
"""Pause before the second try; it doubles before the third."""


def sampling_of(agent: Agent, validate: bool, *, thinks: bool) -> dict[str, Any]:
    """Return the agent's sampling parameters, in validation with those of `validation`. `stop` includes the strings of
    its tool loop; `max_tokens` includes `thinking_tokens` if the model `thinks`."""
    sampling = agent.sampling.model_dump() | (agent.validation.model_dump(exclude_none=True) if validate else {})
    sampling["max_tokens"] += sampling.pop("thinking_tokens") * thinks
    return sampling | {"stop": agent.stop_strings(validate=validate)}


async def generate(
    client: GenerationClient,
    request_id: str,
    prompt_ids: list[int],
    sampling: dict[str, Any],
    *,
    deadline: float,
    limit_s: float | None,
    where: str,
    faults: list[dict[str, Any]],
) -> Generation:
    """Return a checked generation. Raises ModelServerFault after the last try; earlier faults are added to `faults`.

    deadline: the call's, on the loop's clock.
    limit_s: seconds for each try. None allows half of the remaining time, and all of it for the last try.
    """
    clock = asyncio.get_running_loop().time

    async def ask(share: float) -> Generation:
        seconds = limit_s or max(deadline - clock(), 0.001) * share
        with boundary(ModelServerFault, where):
            async with limited(seconds, ModelServerFault, "an answer", where):
                # Copies: clients may remove keys from them.
                answer = await client.generate(request_id, list(prompt_ids), dict(sampling))
            check_generation(answer, sampling["max_tokens"], where)
        return answer

    for attempt in range(0 if getattr(client, "repeats", False) else TRIES - 1):
        try:
            return await ask(0.5)
        except ModelServerFault as fault:
            if not fault.infra:
                raise
            faults.append(fault.record())
        await asyncio.sleep(BACKOFF_S * 2**attempt)
    return await ask(1.0)


def cut_at_stop(generation: Generation, tokenizer: Any, stop: Sequence[str]) -> tuple[Generation, bool]:
    """Return the generation up to and including the token that completes the first `stop` string, and whether there is
    one. Tokens are never split or encoded again: text of that token after the stop string stays, with its log-prob. A
    generation that the server itself ended at a stop string is returned unchanged."""

    def has_stop(count: int) -> bool:
        text = tokenizer.decode(generation.response_ids[:count], skip_special_tokens=False)
        return any(string in text for string in stop)

    total = len(generation.response_ids)
    if not stop or not has_stop(total):
        return generation, False
    # A stop string stays in every longer prefix, so the shortest prefix can be found by bisection.
    length = bisect.bisect_left(range(total), True, key=has_stop)
    ids, log_probs = generation.response_ids[:length], generation.log_probs[:length]
    return replace(generation, response_ids=ids, log_probs=log_probs, stop_reason="stop"), True


def check_generation(answer: Generation, max_tokens: int, where: str = "") -> None:
    """Raise ModelServerFault if `answer` cannot be trained on."""
    ids, log_probs = answer.response_ids, answer.log_probs
    problem = ""
    if len(ids) != len(log_probs):
        problem = f"{len(ids)} tokens with {len(log_probs)} log-probs"
    elif len(ids) > max_tokens:
        problem = f"{len(ids)} tokens, more than the {max_tokens} requested"
    elif plain_ids(ids) is None:
        problem = "invalid token ids"
    elif not _all_finite(log_probs):
        problem = "log-probs that are not finite"
    elif answer.stop_reason not in ("stop", "length"):
        problem = f"stop_reason {answer.stop_reason!r}"
    if problem:
        raise ModelServerFault(f"the server returned {problem}", where=where)


def _all_finite(values: Sequence[Any]) -> bool:
    if not set(map(type, values)) <= {float, int}:  # one check per type, not per token
        values = [value if isinstance(value, Real) else math.nan for value in values]
    return all(map(math.isfinite, values))

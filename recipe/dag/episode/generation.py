"""One answer of a policy's server, or a ModelServerFault.

Invariant: an answer that leaves here has a finite log-prob for each token and no more tokens than were asked for. A
server that fails, hangs or answers nonsense is asked again with the very same seed, a bounded number of times.
"""

from __future__ import annotations

import asyncio
import bisect
import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

from recipe.dag.episode.chat import plain_ids
from recipe.dag.episode.client import GenerationClient
from recipe.dag.episode.record import Generation
from recipe.dag.episode.tasks import limited
from recipe.dag.errors import ModelServerFault, boundary

TRIES = 3
BACKOFF_S = 0.1
"""Before the second try; twice that before the third."""


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
    """`deadline`: the call's, on the loop's clock. `limit_s`: seconds for each try; None: half of what is left, and all
    of it for the last try. Faults of tries that were repeated go to `faults`; the last try's is raised."""
    clock = asyncio.get_running_loop().time

    async def ask(share: float) -> Generation:
        seconds = limit_s or max(deadline - clock(), 0.001) * share
        with boundary(ModelServerFault, where):
            async with limited(seconds, ModelServerFault, "an answer", where):
                # Copies: clients may take keys out of them.
                answer = await client.generate(request_id, list(prompt_ids), dict(sampling))
            check(answer, sampling["max_tokens"], where)
        return answer

    for attempt in range(TRIES - 1):
        try:
            return await ask(0.5)
        except ModelServerFault as fault:
            if not fault.infra:
                raise
            faults.append(fault.record())
        await asyncio.sleep(BACKOFF_S * 2**attempt)
    return await ask(1.0)


def cut_at_stop(made: Generation, tokenizer: Any, stop: Sequence[str]) -> tuple[Generation, bool]:
    """Return the generation up to the token with which the first of the `stop` strings is complete, and whether there
    was one. Tokens are never split nor encoded again: whatever else that token holds stays, with its log-prob. Servers
    that end a generation themselves are left nothing to cut."""

    def stopped(count: int) -> bool:
        text = tokenizer.decode(made.response_ids[:count], skip_special_tokens=False)
        return any(string in text for string in stop)

    total = len(made.response_ids)
    if not stop or not stopped(total):
        return made, False
    first = bisect.bisect_left(range(total), True, key=lambda count: stopped(count))
    return replace(
        made, response_ids=made.response_ids[:first], log_probs=made.log_probs[:first], stop_reason="stop"
    ), True


def check(answer: Generation, max_tokens: int, where: str = "") -> None:
    """Raises ModelServerFault if `answer` cannot be trained on."""
    ids, log_probs = answer.response_ids, answer.log_probs
    problem = ""
    if len(ids) != len(log_probs):
        problem = f"{len(ids)} tokens with {len(log_probs)} log-probs"
    elif len(ids) > max_tokens:
        problem = f"{len(ids)} tokens where {max_tokens} were asked for"
    elif plain_ids(ids) is None:
        problem = "token ids that are no token ids"
    elif not _all_finite(log_probs):
        problem = "log-probs that are not finite"
    elif answer.stop_reason not in ("stop", "length"):
        problem = f"stop_reason {answer.stop_reason!r}"
    if problem:
        raise ModelServerFault(f"the server answered {problem}", where=where)


def _all_finite(values: Sequence[Any]) -> bool:
    if not set(map(type, values)) <= {float, int}:  # a check per kind and not per token
        values = [value if isinstance(value, Real) else math.nan for value in values]
    return all(map(math.isfinite, values))

"""What a function in `validation.metrics` may ask a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from recipe.dag.types.context import Message


class Scorer(Protocol):
    """A policy whose weights the run has."""

    async def log_probs(
        self, messages: Sequence[Message], answers: Sequence[str], *, template: Mapping[str, Any] | None = None
    ) -> list[float]:
        """Return for each of `answers` the log-probability that the policy says exactly this and ends its turn, at
        temperature 1. `template`: options of the chat template. Prompt and answer must fit into the context."""
        ...

"""What the engine offers to agents that work on token ids.

Invariant: only such agents see it; all others build messages, which the engine renders.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from recipe.dag.types.record import Call


@dataclass(frozen=True, slots=True)
class Tokens:
    """The token side of one call (`Context.tokens`)."""

    tokenizer: Any
    """The policy's."""
    encode: Callable[[str], Awaitable[list[int]]]
    """Returns the ids of a text without special tokens around it."""
    sample_ids: Callable[[], Awaitable[list[int]]]
    """Returns the sample's messages, rendered by the agent's chat template."""
    observed: Callable[[Call], Any]
    """Returns what the env that the call's node steps said to its agent after the call; None without an env."""
    notes: dict[Any, Any]
    """What agents leave for those after them; of one attempt to run the episode, and empty at its start."""

"""One attempt to run an episode: what its calls share.

Invariant: an attempt starts from nothing but the sample and the seed; nothing of an earlier attempt is left in it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from recipe.dag.episode.conversation import Conversation
from recipe.dag.episode.seeds import generation_seed
from recipe.dag.types.record import Call, Episode


@dataclass(slots=True)
class Attempt:
    """State shared by all calls of one attempt to run an episode."""

    episode: Episode
    seed: int
    step: int
    validate: bool
    started: float = field(default_factory=time.perf_counter)
    """When the episode's first attempt started, on `time.perf_counter`."""
    tool_state: dict[str, dict] = field(default_factory=dict)
    """By `ToolSpec.key`."""
    env_tool_state: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the envs add to the state of tools before their first call, by tool name."""
    conversations: dict[str, Conversation] = field(default_factory=dict)
    """By node id, for agents with `memory: chat`."""
    notes: dict[Any, Any] = field(default_factory=dict)
    """`Tokens.notes`."""

    def seed_of(self, call: Call) -> int:
        """Return the seed of the call's next generation."""
        return generation_seed(
            self.seed,
            step=self.step,
            validate=self.validate,
            uid=self.episode.uid,
            index=self.episode.index,
            node=call.node,
            turn=call.turn,
            round_index=call.round,
            generation=call.generations,
            candidate=call.candidate,
        )

    def end_without_room(self, call: Call) -> None:
        """End a call whose prompt, or prompt with tool results, does not fit into the model's context."""
        info = self.episode.info
        info["prompt_too_long"] = info.get("prompt_too_long", 0) + 1
        call.stop_reason = "length"

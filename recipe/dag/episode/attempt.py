"""One attempt to run an episode: what its calls share, and the seeds of its generations and envs.

Invariant: an attempt starts from nothing but the sample and the seed; nothing of an earlier attempt is left in it. Two
generations of a run never share a seed, and the same generation gets the same one in every attempt: an episode that the
infrastructure broke is repeated as it would have run, so a fault costs time but never changes what is sampled.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

from recipe.dag.episode.conversation import Conversation, Key
from recipe.dag.episode.fork import Fork
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
    fork: Fork = field(default_factory=Fork)
    """By default, every call is sampled."""
    tool_state: dict[str, dict] = field(default_factory=dict)
    """By `ToolSpec.key`."""
    env_tool_state: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the envs add to the state of tools before their first call, by tool name."""
    conversations: dict[Key, Conversation] = field(default_factory=dict)
    """By the finished call that ends them, for agents with memory."""
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
            draw=self.fork.draw,
        )

    def end_without_room(self, call: Call) -> None:
        """End a call whose prompt, or prompt with tool results, does not fit into the model's context."""
        info = self.episode.info
        info["prompt_too_long"] = info.get("prompt_too_long", 0) + 1
        call.stop_reason = "length"


def generation_seed(
    seed: int,
    *,
    step: int,
    validate: bool,
    uid: str,
    index: int,
    node: str,
    turn: int,
    generation: int,
    round_index: int = 0,
    candidate: int | None = None,
    draw: int = 0,
) -> int:
    """Return a seed of 63 bits. `generation` counts the model's answers within the call, from 0; `candidate` is the
    call's index among the candidates of its node; `draw` is that of a `Fork`."""
    # Round 0 is omitted, so that runs that started before there were loops resume with the same seeds. So is the first
    # candidate, which is what the node would have answered alone.
    later: tuple[object, ...] = (round_index,) if round_index else ()
    later += ("candidate", candidate) if candidate else ()
    later += ("draw", draw) if draw else ()
    return _digest("generation", seed, step, validate, uid, index, node, turn, generation, *later) >> 1


def env_seed(seed: int, *, uid: str, env: str) -> int:
    """Return a seed of 31 bits, which every random generator accepts. All episodes of a group get the same one, because
    they are compared with each other."""
    return _digest("env", seed, uid, env) >> 33


def _digest(*parts: object) -> int:
    data = json.dumps(parts, separators=(",", ":")).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())

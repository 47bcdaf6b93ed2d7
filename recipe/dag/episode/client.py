"""What the episode runner needs of a policy: token ids in, token ids and log-probs out.

Invariant: the runner knows nothing of Ray or of any server. `policy/` implements this over verl's server client.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from recipe.dag.episode.codec import TextCodec
from recipe.dag.episode.record import Generation


class GenerationClient(Protocol):
    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Generation:
        """`sampling`: the fields of `Sampling`, plus `seed`. Raises ModelServerFault. `request_id` is the same for all
        generations of one agent in one episode, so that a router can keep them on one replica."""


@dataclass(slots=True)
class PolicyEndpoint:
    """A policy as an agent meets it."""

    client: GenerationClient
    tokenizer: Any
    """A transformers tokenizer, or what has its apply_chat_template, encode, decode, eos_token_id."""
    max_model_len: int
    """Prompt and response together, in tokens."""
    codec: TextCodec = field(init=False)

    def __post_init__(self) -> None:
        self.codec = TextCodec(self.tokenizer)

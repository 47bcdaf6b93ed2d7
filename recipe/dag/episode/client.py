"""The interface of a policy to the episode runner: token ids in, token ids and log-probs out.

Invariant: independent of Ray and of any server. `policy/` implements this with verl's server client.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from recipe.dag.episode.codec import TextCodec
from recipe.dag.types.record import Generation


class GenerationClient(Protocol):
    """A client of a policy's inference servers."""

    async def generate(self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Generation:
        """Return one generation. `sampling`: the fields of `Sampling`, plus `seed`. `request_id` is the same for all
        generations of one agent in one episode, so that a router can keep them on one replica. Raises
        ModelServerFault. A client with a true attribute `repeats` repeats failed requests itself."""
        ...


@dataclass(slots=True)
class PolicyEndpoint:
    """A policy as an agent uses it."""

    client: GenerationClient
    tokenizer: Any
    """A transformers tokenizer, or an object with its apply_chat_template, encode, decode and eos_token_id."""
    max_model_len: int
    """Tokens of prompt and response together."""
    max_response_length: int | None = None
    """Tokens of one call's response: all its generations, and what is between them."""
    codec: TextCodec = field(init=False)

    def __post_init__(self) -> None:
        self.codec = TextCodec(self.tokenizer)

    def room(self, prompt_tokens: int, response_tokens: int = 0) -> int:
        """Return how many tokens still fit into a call."""
        left = self.max_model_len - prompt_tokens - response_tokens
        return left if self.max_response_length is None else min(left, self.max_response_length - response_tokens)

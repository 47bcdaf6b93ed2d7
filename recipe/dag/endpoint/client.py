"""The interfaces of a policy to its agents: token ids in, token ids and log-probs out; or messages in, a message out.

Invariant: independent of Ray and of any server. `policy/` implements the first with verl's server client, `remote/`
both with clients of other servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from recipe.dag.endpoint.codec import TextCodec
from recipe.dag.types.context import Message
from recipe.dag.types.record import Generation
from recipe.dag.types.usage import Usage


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


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    message: Message
    stop_reason: str
    usage: Usage


class ChatEndpoint(Protocol):
    """A policy that agents use through messages, because it has no tokenizer."""

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: dict[str, Any],
        *,
        timeout_s: float,
        tools: list[dict[str, Any]] | None = None,
        template: dict[str, Any] | None = None,
    ) -> ChatAnswer:
        """Return the model's next message. `sampling`: as of `GenerationClient`. `template`: options of the server's
        chat template. Raises ModelServerFault, PromptTooLong among them, and UserError."""
        ...


Endpoint = PolicyEndpoint | ChatEndpoint

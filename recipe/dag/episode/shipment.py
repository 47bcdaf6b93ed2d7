"""Episodes on their way from one process to another.

Invariant: what arrives is what was sent, bit for bit. Token lists travel as arrays, which are copied as a block where a
list is written number by number; a prompt that nobody has decoded travels undecoded.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from functools import partial
from typing import Any

from recipe.dag.episode.client import PolicyEndpoint
from recipe.dag.episode.record import Call, Episode

TOKENS = {"prompt_ids": "q", "response_ids": "q", "response_mask": "b", "rollout_log_probs": "d"}
"""Fields of a call that hold one number per token, and the arrays that hold any of them exactly."""
KINDS = {"q": int, "b": int, "d": float}


class Undecoded:
    """Stands for a prompt's text while a call travels."""


def pack(episode: Episode) -> Episode:
    """Make `episode` ready to be pickled. It must not be read again in this process."""
    for call in episode.calls:
        for name, code in TOKENS.items():
            values = getattr(call, name)
            if set(map(type, values)) <= {KINDS[code]}:  # what a server reports may be another number
                setattr(call, name, array(code, values))
        if callable(Call.prompt_text.unread(call)):
            call.prompt_text = Undecoded()
    return episode


def unpack(episode: Episode, endpoints: Mapping[str, PolicyEndpoint]) -> Episode:
    """Make what `pack` returned, after its way, an episode again. `endpoints` decode prompts that somebody reads."""
    for call in episode.calls:
        for name in TOKENS:
            values: Any = getattr(call, name)
            if isinstance(values, array):
                setattr(call, name, values.tolist())
        if isinstance(Call.prompt_text.unread(call), Undecoded):
            decode = endpoints[call.policy].codec.decode
            call.prompt_text = partial(decode, call.prompt_ids, skip_special_tokens=False)
    return episode

"""Prepares episodes for pickling and restores them in another process.

Invariant: the restored episode equals the original, bit for bit. Token lists are sent as arrays, which are pickled as
one block instead of number by number; a prompt that has not been decoded is sent undecoded.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from functools import partial
from typing import Any

from recipe.dag.endpoint.client import Endpoint, PolicyEndpoint
from recipe.dag.types.record import PROMPT_TEXT, TOKENS, Episode

CODES = dict(zip(TOKENS, "qqbd", strict=True))
"""The array type code that represents the values of a field exactly."""
KINDS = {"q": int, "b": int, "d": float}


class Undecoded:
    """Placeholder for a prompt's text while the call is sent."""


def pack(episode: Episode) -> Episode:
    """Prepare `episode` for pickling. It must not be read again in this process."""
    for call in episode.all_calls:
        for name, code in CODES.items():
            values = getattr(call, name)
            if set(map(type, values)) <= {KINDS[code]}:  # servers may return other types, which stay a list
                setattr(call, name, array(code, values))
        if callable(PROMPT_TEXT.raw(call)):
            PROMPT_TEXT.defer(call, Undecoded())
    return episode


def unpack(episode: Episode, endpoints: Mapping[str, Endpoint]) -> Episode:
    """Restore an episode from `pack`. `endpoints`: by policy; they decode the prompts that are read."""
    for call in episode.all_calls:
        for name in TOKENS:
            values: Any = getattr(call, name)
            if isinstance(values, array):
                setattr(call, name, values.tolist())
        if isinstance(PROMPT_TEXT.raw(call), Undecoded):
            endpoint = endpoints[call.policy]
            assert isinstance(endpoint, PolicyEndpoint)  # only token ids are decoded late
            decode = endpoint.codec.decode
            PROMPT_TEXT.defer(call, partial(decode, call.prompt_ids, skip_special_tokens=False))
    return episode

"""Every random choice of an episode follows from its coordinates.

Invariant: two generations of a run never share a seed, and the same generation always has the same one. Which try it is
does not count: an episode that the infrastructure broke is run again as it would have gone, so that a fault can cost
time or an episode, but never picks other samples.
"""

from __future__ import annotations

import hashlib
import json


def generation_seed(
    seed: int, *, step: int, validate: bool, uid: str, index: int, node: str, turn: int, generation: int, round: int = 0
) -> int:
    """63 bits. `generation` counts the model's answers within the call, from 0."""
    # Round 0 stands for itself by being left out: a run without loops, resumed, goes on as it began.
    later = (round,) if round else ()
    return _digest("generation", seed, step, validate, uid, index, node, turn, generation, *later) >> 1


def env_seed(seed: int, *, uid: str, env: str) -> int:
    """31 bits, which every generator accepts. One for the whole group: its episodes are compared with each other."""
    return _digest("env", seed, uid, env) >> 33


def _digest(*parts: object) -> int:
    data = json.dumps(parts, separators=(",", ":")).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())

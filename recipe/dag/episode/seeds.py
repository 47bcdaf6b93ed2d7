"""Seeds derived from the coordinates of a generation or env.

Invariant: two generations of a run never share a seed, and the same generation always gets the same one, in whichever
attempt. An episode that the infrastructure broke is repeated as it would have run, so a fault costs time but never
changes what is sampled.
"""

from __future__ import annotations

import hashlib
import json


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
) -> int:
    """Return a seed of 63 bits. `generation` counts the model's answers within the call, from 0; `candidate` is the
    call's index among the candidates of its node."""
    # Round 0 is omitted, so that runs that started before there were loops resume with the same seeds. So is the first
    # candidate, which is what the node would have answered alone.
    later: tuple[object, ...] = (round_index,) if round_index else ()
    later += ("candidate", candidate) if candidate else ()
    return _digest("generation", seed, step, validate, uid, index, node, turn, generation, *later) >> 1


def env_seed(seed: int, *, uid: str, env: str) -> int:
    """Return a seed of 31 bits, which every random generator accepts. All episodes of a group get the same one, because
    they are compared with each other."""
    return _digest("env", seed, uid, env) >> 33


def _digest(*parts: object) -> int:
    data = json.dumps(parts, separators=(",", ":")).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())

"""Sequential updates with the compound factor (HAPPO, Kuba et al., arXiv 2109.11251).

Invariant: the factor of an episode multiplies an agent's advantages before the clip and is positive, so it never turns
a sign. It starts at 1, and after an agent's update it is multiplied by what that update did to the probability of what
the agent said; an agent that was not called in an episode leaves that episode's factor as it is. Behaviour log-probs
are those from before the first agent's update.

One policy per agent is assumed: where two agents share weights, the first one's update moves the second one's policy,
and the factor counts that move twice.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from recipe.dag.credit.options import check_choice

LEVELS = ("sequence_sum", "sequence_mean", "clamped")
"""sequence_sum: the exact ratio of what an agent said in an episode, all its tokens. sequence_mean: exp of the mean
log-ratio of its tokens (as in GSPO), an approximation that long answers cannot blow up. clamped: the exact ratio kept
within [1 / bound, bound], an approximation that forgets how far a policy moved."""

LARGEST = 80.0
"""Bound on the logarithm of a factor, far inside float64 and inside float32: a factor stays finite and above 0."""


def log_ratio(
    new: Sequence[Tensor],
    old: Sequence[Tensor],
    mask: Sequence[Tensor],
    episode: Sequence[Hashable],
    *,
    level: str = "sequence_sum",
    bound: float = 2.0,
) -> dict[Hashable, float]:
    """Per episode, log(pi_new / pi_old) of what one agent said in it. `new` and `old`: log-probs (nats), one tensor per
    row; `mask`: True where sampled; `episode`: which one each row belongs to (several rows may belong to one). Episodes
    in which the agent sampled nothing are left out."""
    check_choice("ratio level", level, LEVELS)
    if not bound >= 1.0:
        raise ValueError(f"bound: {bound} is not at least 1")
    parts: dict[Hashable, list[Tensor]] = defaultdict(list)
    for after, before, sampled, name in zip(new, old, mask, episode, strict=True):
        parts[name].append((after.double() - before.double())[sampled.bool()])
    found = {}
    for name, differences in parts.items():
        tokens = torch.cat(differences)
        if not len(tokens):
            continue
        total = (tokens.mean() if level == "sequence_mean" else tokens.sum()).item()
        if not math.isfinite(total):
            raise ValueError(f"episode {name}: a log-prob is not finite")
        limit = math.log(bound) if level == "clamped" else LARGEST
        found[name] = min(max(total, -limit), limit)
    return found


def sampled_mask(mask: Sequence[int]) -> Tensor:
    """[n] bool of a row's mask."""
    if not len(mask):
        return torch.zeros(0, dtype=torch.bool)
    return torch.frombuffer(bytearray(mask), dtype=torch.uint8).bool()  # walks the list in C


def advance(log_factor: Mapping[Hashable, float], ratios: Mapping[Hashable, float]) -> dict[Hashable, float]:
    """The logarithms of the factors for the next agent: those of the episodes that `ratios` does not name pass
    through. A factor that is not there is 1."""
    names = {**log_factor, **ratios}
    total = {name: log_factor.get(name, 0.0) + ratios.get(name, 0.0) for name in names}
    return {name: min(max(value, -LARGEST), LARGEST) for name, value in total.items()}


def weigh(
    advantages: Sequence[Tensor], episode: Sequence[Hashable], log_factor: Mapping[Hashable, float]
) -> list[Tensor]:
    """The advantages M of an agent's rows. Tokens of different agents have no common axis, so one factor per episode
    goes to all tokens of its rows; a factor of 1 leaves every bit as it is."""
    return [
        values if log_factor.get(name, 0.0) == 0.0 else values * math.exp(log_factor[name])
        for values, name in zip(advantages, episode, strict=True)
    ]


def update_order(
    agents: Sequence[str], order: str, *, seed: int, step: int, depends: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """Who is updated when. `random`: a permutation drawn anew in every step from the seed and the step alone, as the
    theory asks. `reverse_topological`: whoever speaks last first, so that followers answer best before leaders move;
    `depends` says whom each agent listens to. Agents that do not hear each other keep their order."""
    if order == "random":
        shuffled = list(agents)
        random.Random(f"happo {seed} {step}").shuffle(shuffled)
        return shuffled
    if order != "reverse_topological":
        raise ValueError(f"update order: {order!r} is none of random, reverse_topological")
    hears = {agent: {d for d in (depends or {}).get(agent, ()) if d in agents and d != agent} for agent in agents}
    left, found = list(agents), []
    while left:
        last = [agent for agent in left if not any(agent in hears[other] for other in left)]
        if not last:
            raise ValueError(f"agents {', '.join(left)} listen to each other in a cycle; choose order `random`")
        found.append(last[0])
        left.remove(last[0])
    return found

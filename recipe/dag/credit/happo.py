"""Sequential updates with the compound factor (HAPPO, Kuba et al., arXiv 2109.11251).

Invariant: a factor multiplies an agent's advantages before the clip and is positive, so it never turns a sign. It
starts at 1, and after an agent's update it is multiplied by what that update did to the probability of what the agent
said; an agent that was not called leaves the factor as it is. Behaviour log-probs are those from before the first
agent's update.

A factor belongs to a unit: one turn of an episode where advantages differ by turn (the same time step, as in the
paper), the whole episode where one return is every turn's (recipe.dag.algorithms.advantages_per_turn).

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
"""sequence_sum: the exact ratio of what an agent said in a unit, all its tokens; its variance grows with their number.
sequence_mean: exp of the mean log-ratio of its tokens (as in GSPO), which is 1 within a thousandth or two from a
hundred tokens on, so that no update is felt. clamped: the exact ratio kept within [1 / bound, bound]: exact where
policies moved little, and bounded where they moved far. examples/happo_factors.py measures all three."""

BOUND = 4.0
"""Of `clamped`: at a KL of 1e-4 per token, 2,048 tokens lose a hundredth of the correction to it, and a fifth to 2."""

LARGEST = 80.0
"""Bound on the logarithm of a factor, far inside float64 and inside float32: a factor stays finite and above 0."""


def log_ratio(
    new: Sequence[Tensor],
    old: Sequence[Tensor],
    mask: Sequence[Tensor],
    unit: Sequence[Hashable],
    *,
    level: str = "sequence_sum",
    bound: float = BOUND,
) -> dict[Hashable, float]:
    """Return, per unit, log(pi_new / pi_old) of what one agent said in it. `new` and `old`: log-probs (nats), one
    tensor per row or call; `mask`: True where sampled; `unit`: the one that each belongs to (several may belong to
    one). Units in which the agent sampled nothing are left out. Raises ValueError for a log-prob that is not finite."""
    check_choice("ratio level", level, LEVELS)
    if not bound >= 1.0:
        raise ValueError(f"bound: {bound} is not at least 1")
    parts: dict[Hashable, list[Tensor]] = defaultdict(list)
    for after, before, sampled, name in zip(new, old, mask, unit, strict=True):
        parts[name].append((after.double() - before.double())[sampled.bool()])
    found = {}
    for name, differences in parts.items():
        tokens = torch.cat(differences)
        if not len(tokens):
            continue
        total = (tokens.mean() if level == "sequence_mean" else tokens.sum()).item()
        if not math.isfinite(total):
            raise ValueError(f"unit {name}: a log-prob is not finite")
        limit = math.log(bound) if level == "clamped" else LARGEST
        found[name] = min(max(total, -limit), limit)
    return found


def sampled_mask(mask: Sequence[int]) -> Tensor:
    """[n] bool of a row's mask."""
    if not len(mask):
        return torch.zeros(0, dtype=torch.bool)
    return torch.frombuffer(bytearray(mask), dtype=torch.uint8).bool()  # walks the list in C


def advance(log_factor: Mapping[Hashable, float], ratios: Mapping[Hashable, float]) -> dict[Hashable, float]:
    """The logarithms of the factors for the next agent: those of the units that `ratios` does not name pass
    through. A factor that is not there is 1."""
    names = {**log_factor, **ratios}
    total = {name: log_factor.get(name, 0.0) + ratios.get(name, 0.0) for name in names}
    return {name: min(max(value, -LARGEST), LARGEST) for name, value in total.items()}


def weigh(advantages: Sequence[Tensor], unit: Sequence[Hashable], log_factor: Mapping[Hashable, float]) -> list[Tensor]:
    """Return the advantages M of an agent's rows or calls. Tokens of different agents have no common axis, so one
    factor per unit goes to all its tokens; a factor of 1 leaves every bit as it is."""
    return [
        values if log_factor.get(name, 0.0) == 0.0 else values * math.exp(log_factor[name])
        for values, name in zip(advantages, unit, strict=True)
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

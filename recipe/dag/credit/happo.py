"""Sequential updates with the compound factor M (HAPPO, Kuba et al., arXiv 2109.11251).

    M^{1} = 1        M^{m+1} = M^{m} pi_new(a^m | s) / pi_old(a^m | s)        for the m-th agent that is updated

Invariant: a factor multiplies an agent's advantages before the clip and is positive, so it never changes a sign. An
agent that was not called leaves the factor as it is. The old log-probs are those from before the first agent's update.

Factors are kept as logarithms, one per unit: one turn of an episode where advantages differ by turn (the time step of
the paper), the whole episode where all turns share one return (`Algorithm.advantages_per_turn`).

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
"""sequence_sum: the exact ratio of all tokens that an agent sampled in a unit; its variance grows with their number.
sequence_mean: exp of the mean log-ratio of the tokens (as in GSPO); within 0.002 of 1 from a hundred tokens on, so that
no update is felt. clamped: the exact ratio kept within [1 / bound, bound], which leaves small moves exact and bounds
large ones. At a KL of 1e-4 per token and 2,048 tokens, a bound of 4 loses a hundredth of the correction and a bound of
2 a fifth; examples/happo_factors.py measures all three."""

LARGEST = 80.0
"""Bound on the logarithm of a factor: exp of it is positive and finite in float32."""


def log_ratio(
    new: Sequence[Tensor],
    old: Sequence[Tensor],
    mask: Sequence[Tensor],
    units: Sequence[Hashable],
    *,
    level: str,
    bound: float,
) -> dict[Hashable, float]:
    """Return log(pi_new / pi_old) of one agent's sampled tokens in each unit.

    `new` and `old`: log-probs (nats), one tensor per row or call; `mask`: True where sampled; `units`: the unit of each
    row or call (several may share one). Units in which the agent sampled nothing are left out. `bound`: that of
    `clamped`, not read by the other levels. Raises ValueError for a log-prob that is not finite.
    """
    check_choice("ratio level", level, LEVELS)
    if not bound >= 1.0:
        raise ValueError(f"bound: {bound} is not at least 1")
    differences: dict[Hashable, list[Tensor]] = defaultdict(list)
    for after, before, sampled, unit in zip(new, old, mask, units, strict=True):
        differences[unit].append((after.double() - before.double())[sampled.bool()])
    ratios = {}
    for unit, parts in differences.items():
        tokens = torch.cat(parts)
        if not len(tokens):
            continue
        total = (tokens.mean() if level == "sequence_mean" else tokens.sum()).item()
        if not math.isfinite(total):
            raise ValueError(f"unit {unit}: a log-prob is not finite")
        # clamped: one unit that moved far must not decide the updates of all agents after this one
        limit = math.log(bound) if level == "clamped" else LARGEST
        ratios[unit] = min(max(total, -limit), limit)
    return ratios


def sampled_mask(mask: Sequence[int]) -> Tensor:
    """Return a row's response mask as a bool tensor."""
    if not len(mask):
        return torch.zeros(0, dtype=torch.bool)
    return torch.frombuffer(bytearray(mask), dtype=torch.uint8).bool()  # bytearray() walks the list in C


def advance(log_factor: Mapping[Hashable, float], ratios: Mapping[Hashable, float]) -> dict[Hashable, float]:
    """Return the log-factors for the next agent: M^{m+1} = M^{m} times the ratio. Units that are not in `ratios` keep
    their factor; a missing factor is 1."""
    units = {**log_factor, **ratios}
    # in logarithms: the product of many ratios leaves the range of floats long before its logarithm does
    total = {unit: log_factor.get(unit, 0.0) + ratios.get(unit, 0.0) for unit in units}
    return {unit: min(max(value, -LARGEST), LARGEST) for unit, value in total.items()}


def weigh(
    advantages: Sequence[Tensor], units: Sequence[Hashable], log_factor: Mapping[Hashable, float]
) -> list[Tensor]:
    """Return the advantages of an agent's rows or calls times M. Tokens of different agents do not align, so all tokens
    of a unit have one factor; a factor of 1 leaves every bit as it is."""
    return [
        values if log_factor.get(unit, 0.0) == 0.0 else values * math.exp(log_factor[unit])
        for values, unit in zip(advantages, units, strict=True)
    ]


def update_order(
    agents: Sequence[str], order: str, *, seed: int, step: int, depends: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """Return the order in which agents are updated.

    `random`: a permutation that depends on the seed and the step only, drawn anew in every step as the theory requires.
    `reverse_topological`: last speakers first, so that followers respond best before leaders move; `depends` lists the
    agents that each agent hears. Agents that do not hear each other keep their order.
    """
    if order == "random":
        shuffled = list(agents)
        random.Random(f"happo {seed} {step}").shuffle(shuffled)
        return shuffled
    check_choice("update order", order, ("random", "reverse_topological"))
    hears = {}
    for agent in agents:
        heard = (depends or {}).get(agent, ())
        hears[agent] = {other for other in heard if other in agents and other != agent}
    remaining, ordered = list(agents), []
    while remaining:
        unheard = [agent for agent in remaining if not any(agent in hears[other] for other in remaining)]
        if not unheard:
            raise ValueError(f"agents {', '.join(remaining)} listen to each other in a cycle; choose order `random`")
        ordered.append(unheard[0])
        remaining.remove(unheard[0])
    return ordered

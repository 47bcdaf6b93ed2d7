"""Reward nodes that shape what the nodes before them paid: turns, teams, debates and votes.

Invariant: each is a node of its own, after the node that grades. Rewards of several nodes add up, so what is returned
is the difference to what a call has already. The arithmetic is recipe.dag.credit's.

    - {node_id: shape, node_type: COMPUTE, node_role: REWARD, dependencies: [grade],
       executable_ref: "recipe.dag.reward.credit:shaped", executable_kwargs: {shaping: margin, alpha: 0.5}}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from recipe.dag.credit import shaping as shapings
from recipe.dag.credit.incentive import Incentives, incentives
from recipe.dag.credit.vote import marginals
from recipe.dag.episode.answers import normalised
from recipe.dag.episode.record import Call, Episode
from recipe.dag.errors import UserError

SHAPINGS: dict[str, Callable[..., torch.Tensor]] = {
    "team_local": shapings.team_local,
    "shared": shapings.shared,
    "discounted": shapings.discounted,
    "verifier_sum": shapings.verifier_sum,
    "margin": shapings.margin,
    "quality": shapings.quality,
    "with_outcome": shapings.with_outcome,
    "influence": shapings.influence,
}


def shaped(episode: Episode, *, shaping: str, **options: float) -> dict[str, list[float]]:
    """Every call's reward becomes what `shaping` (a function of credit/shaping.py, with its options) makes of it. A
    turn is one round of one turn. Raises UserError for an unknown shaping or option, for an agent that moved twice in
    a round, and for `with_outcome` without an outcome."""
    if shaping not in SHAPINGS:
        raise UserError(f"shaped: shaping {shaping!r} is none of {', '.join(SHAPINGS)}")
    rewards, mask, place = _table(episode)
    if shaping == "with_outcome":
        if episode.outcome is None:
            raise UserError("shaped: with_outcome needs an outcome; let this node depend on the node that grades")
        options = {"outcome": torch.tensor([episode.outcome], dtype=rewards.dtype), **options}
    try:
        found = SHAPINGS[shaping](rewards, mask, **options)
    except TypeError as error:
        raise UserError(f"shaped: {shaping} has other options: {error}") from error
    return _by_agent(episode.calls, [(found - rewards)[place[index]].item() for index in range(len(episode.calls))])


def debate_incentives(
    episode: Episode,
    *,
    follow: float = 0.0,
    leave: float = 0.0,
    repel: float = 0.0,
    attract: float = 0.0,
    threshold: float = 0.5,
) -> dict[str, list[float]]:
    """Adds MAPoRL's incentives to the rewards of a debate, which must be scores (credit/incentive.py)."""
    rewards, mask, place = _table(episode)
    weights = Incentives(follow=follow, leave=leave, repel=repel, attract=attract)
    bonus = incentives(rewards, mask, weights, threshold=threshold)
    return _by_agent(episode.calls, [bonus[place[index]].item() for index in range(len(episode.calls))])


def vote_marginals(
    episode: Episode, *, voters: Sequence[str], key: str = "answer", ties: str = "first", weight: float = 1.0
) -> dict[str, list[float]]:
    """The last call of each node in `voters` (a VOTE node's dependencies, in their order) gets, in place of its own
    reward, `weight` times what the vote earned with its ballot and would not have earned without it. A ballot is worth
    the reward of whoever cast it, and equal to another where a VOTE node takes them for equal. A voter that did not
    move abstains. `episode.info["contribution/<node>"]` is what the vote would have lost without it (0.0 for one that
    abstained): its mean is the leave-one-agent-out report (`info/contribution/<node>` in the metrics)."""
    last = {node: index for index, call in enumerate(episode.calls) for node in [call.node] if node in voters}
    said = [episode.calls[last[node]].parsed.get(key) if node in last else None for node in voters]
    ballots = [None if answer is None else normalised(answer) for answer in said]
    worth = {
        ballot: episode.calls[last[node]].reward or 0.0
        for node, ballot in zip(voters, ballots, strict=True)
        if ballot is not None
    }
    change = [0.0] * len(episode.calls)
    for node, marginal in zip(voters, marginals(ballots, worth, ties), strict=True):
        episode.info[f"contribution/{node}"] = marginal
        if node in last:
            change[last[node]] = weight * marginal - (episode.calls[last[node]].reward or 0.0)
    return _by_agent(episode.calls, change)


def _table(episode: Episode) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int, int]]]:
    """(rewards [1, T, A], mask, the place of each call)."""
    turns = {turn: t for t, turn in enumerate(sorted({(call.turn, call.round) for call in episode.calls}))}
    agents = {agent: a for a, agent in enumerate(dict.fromkeys(call.agent for call in episode.calls))}
    rewards = torch.zeros(1, len(turns), len(agents), dtype=torch.float64)
    mask, place = torch.zeros_like(rewards, dtype=torch.bool), []
    for call in episode.calls:
        at = (0, turns[call.turn, call.round], agents[call.agent])
        if mask[at]:
            raise UserError(
                f"agent {call.agent} moved twice in turn {call.turn}, round {call.round}; shaping over turns needs one "
                "move per agent and round"
            )
        rewards[at], mask[at] = call.reward or 0.0, True
        place.append(at)
    return rewards, mask, place


def _by_agent(calls: Sequence[Call], values: Sequence[float]) -> dict[str, list[float]]:
    found: dict[str, Any] = {}
    for call, value in zip(calls, values, strict=True):
        found.setdefault(call.agent, []).append(value)
    return found

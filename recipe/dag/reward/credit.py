"""Reward nodes that shape what the nodes before them paid: turns, teams, debates and votes.

Invariant: each is a node of its own, after the node that grades. Rewards of several nodes add up, so what is returned
is the difference to what a call has already. The arithmetic is recipe.dag.credit's.

    - {node_id: shape, node_type: COMPUTE, node_role: REWARD, dependencies: [grade],
       executable_ref: "recipe.dag.reward.credit:shaped", executable_kwargs: {shaping: margin, alpha: 0.5}}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum
from typing import Any

import torch

from recipe.dag.credit import shaping as shapings
from recipe.dag.credit.incentive import Incentives, incentives
from recipe.dag.credit.vote import marginals
from recipe.dag.episode.answers import normalised
from recipe.dag.episode.record import Call, Episode
from recipe.dag.errors import UserError
from recipe.dag.rewards import SHAPINGS as CATALOGUED

SHAPINGS: dict[str, Callable[..., torch.Tensor]] = {name: getattr(shapings, name) for name in CATALOGUED}


def shaped(
    episode: Episode, *, shaping: str, players: Sequence[Sequence[str]] | None = None, **options: float
) -> dict[str, list[float]]:
    """Every call's reward becomes what `shaping` (a function of credit/shaping.py, with its options) makes of it. A
    turn is one round of one turn, and who moves in it is a node. `players`: who else it is, in lists of nodes that are
    one player, such as a solver's and then the one that defends its answer; the k-th nodes of all lists speak at the
    same stage, each stage is a turn of its own, and calls of further nodes stay as they are. Raises UserError for an
    unknown shaping or option, and for `with_outcome` without an outcome."""
    if shaping not in SHAPINGS:
        raise UserError(f"shaped: shaping {shaping!r} is none of {', '.join(SHAPINGS)}")
    rewards, mask, places = _table(episode, players)
    if shaping == "with_outcome":
        if episode.outcome is None:
            raise UserError("shaped: with_outcome needs an outcome; let this node depend on the node that grades")
        options = {"outcome": torch.tensor([episode.outcome], dtype=rewards.dtype), **options}
    try:
        found = SHAPINGS[shaping](rewards, mask, **options)
    except TypeError as error:
        raise UserError(f"shaped: {shaping} has other options: {error}") from error
    return _by_agent(episode.calls, _per_call(found - rewards, places))


def debate_incentives(
    episode: Episode,
    *,
    follow: float = 0.0,
    leave: float = 0.0,
    repel: float = 0.0,
    attract: float = 0.0,
    threshold: float = 0.5,
    players: Sequence[Sequence[str]] | None = None,
) -> dict[str, list[float]]:
    """Adds MAPoRL's incentives to the rewards of a debate, which must be scores (credit/incentive.py); `players` as in
    `shaped`."""
    rewards, mask, places = _table(episode, players)
    weights = Incentives(follow=follow, leave=leave, repel=repel, attract=attract)
    bonus = incentives(rewards, mask, weights, threshold=threshold)
    return _by_agent(episode.calls, _per_call(bonus, places))


def conditional_quality(
    episode: Episode, *, verifier: str, generator: str, key: str = "verdict", right: Any = True, threshold: float = 0.5
) -> dict[str, list[float]]:
    """Every call of the node `verifier` earns, in place of its own reward, 1 if its verdict on the call of `generator`
    before it is true, else 0 (MARTI). It says that this one was right where `parsed[key]` equals `right`; it was where
    it has a reward of at least `threshold`. Where there is no verdict, or nothing to judge, the reward stays."""
    rewards, mask, places = _table(episode, None)
    verdicts, judged = torch.full_like(rewards, torch.nan), torch.full_like(rewards, torch.nan)
    subject = None
    for call, place in zip(episode.calls, places, strict=True):
        if call.node == generator:
            subject = None if call.unscored else call.reward or 0.0
        elif call.node == verifier and subject is not None and call.parsed.get(key) is not None:
            verdicts[place] = float(normalised(call.parsed[key]) == normalised(right))
            judged[place] = subject
    found = shapings.conditional_quality(rewards, mask, verdicts, judged, threshold=threshold)
    return _by_agent(episode.calls, _per_call(found - rewards, places))


def vote_marginals(
    episode: Episode, *, voters: Sequence[str], key: str = "answer", ties: str = "first", weight: float = 1.0
) -> dict[str, list[float]]:
    """The last call of each node in `voters` (a VOTE node's dependencies, in their order) gets, in place of its own
    reward, `weight` times what the vote earned with its ballot and would not have earned without it. A ballot is worth
    the mean reward of those who cast it, and equal to another where a VOTE node takes them for equal. A voter that did
    not move abstains. `episode.info["contribution/<node>"]` is what the vote would have lost without it (0.0 for one
    that abstained): its mean is the leave-one-agent-out report (`info/contribution/<node>` in the metrics)."""
    calls = [(index, call) for index, call in enumerate(episode.calls) if call.node in voters and not call.unscored]
    last = {call.node: index for index, call in calls}
    said = [episode.calls[last[node]].parsed.get(key) if node in last else None for node in voters]
    ballots = [None if answer is None else normalised(answer) for answer in said]
    paid: dict[str, list[float]] = {}
    for node, ballot in zip(voters, ballots, strict=True):
        if ballot is not None:
            paid.setdefault(ballot, []).append(episode.calls[last[node]].reward or 0.0)
    worth = {ballot: fsum(rewards) / len(rewards) for ballot, rewards in paid.items()}
    change = [0.0] * len(episode.calls)
    for node, marginal in zip(voters, marginals(ballots, worth, ties), strict=True):
        episode.info[f"contribution/{node}"] = marginal
        if node in last:
            change[last[node]] = weight * marginal - (episode.calls[last[node]].reward or 0.0)
    return _by_agent(episode.calls, change)


Place = tuple[int, int, int]


def _table(
    episode: Episode, players: Sequence[Sequence[str]] | None
) -> tuple[torch.Tensor, torch.Tensor, list[Place | None]]:
    """(rewards [1, T, A], mask, the place of each call; None for one of no player). T is in the calls' order."""
    lists = players or [[node] for node in dict.fromkeys(call.node for call in episode.calls)]
    seats = {node: (column, stage) for column, nodes in enumerate(lists) for stage, node in enumerate(nodes)}
    moves = [call for call in episode.calls if call.node in seats]
    times = dict.fromkeys((call.turn, seats[call.node][1], call.round) for call in moves)
    order = {time: index for index, time in enumerate(times)}
    rewards = torch.zeros(1, max(1, len(order)), len(lists), dtype=torch.float64)
    mask, places = torch.zeros_like(rewards, dtype=torch.bool), []
    for call in episode.calls:
        column, stage = seats.get(call.node, (None, None))
        place = None if column is None or call.unscored else (0, order[call.turn, stage, call.round], column)
        if place is not None:
            rewards[place], mask[place] = call.reward or 0.0, True
        places.append(place)
    return rewards, mask, places


def _per_call(values: torch.Tensor, places: Sequence[Place | None]) -> list[float]:
    return [0.0 if place is None else values[place].item() for place in places]


def _by_agent(calls: Sequence[Call], values: Sequence[float]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for call, value in zip(calls, values, strict=True):
        found.setdefault(call.agent, []).append(value)
    return found

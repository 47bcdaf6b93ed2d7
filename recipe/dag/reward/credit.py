"""Reward nodes that reshape the rewards of earlier nodes: turns, teams, debates and votes.

Invariant: each is a separate node after the one that grades. Rewards of several nodes add up, so a function returns the
difference to the reward that a call already has. The arithmetic is in recipe.dag.credit.

    - {id: shape, reward: "recipe.dag.reward.credit:shaped", args: {shaping: margin, alpha: 0.5}, after: grade}
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import fsum
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from recipe.dag.algorithms import reward_catalogue
from recipe.dag.core.errors import UserError
from recipe.dag.credit import shaping as shapings
from recipe.dag.credit.incentive import Incentives, incentives
from recipe.dag.credit.vote import marginals
from recipe.dag.types.record import Call, Episode
from recipe.dag.types.reward import Catalogued, NodeName, NodeNames, Players, Scalar, ShapingName
from recipe.dag.types.values import normalized

SHAPINGS: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(shapings, name) for name in reward_catalogue.shapings()
}


@Catalogued("credit/shaping.py")
def shaped(
    episode: Episode, *, shaping: ShapingName, players: Players | None = None, **options: float
) -> dict[str, list[float]]:
    """Replace every call's reward with the result of `shaping`, a function of credit/shaping.py with its options.

    By default each node is a player, and each round of a turn of the episode is a turn of the shaping.

    players: lists of nodes that are one player each, such as a solver's node and then the node that defends its answer.
        The k-th nodes of all lists act at the same stage, and each stage is a separate turn. Calls of nodes in no list
        keep their reward.

    Raises UserError for an unknown shaping or option, and for `with_outcome` without an outcome.
    """
    if shaping not in SHAPINGS:
        raise UserError(f"shaped: unknown shaping {shaping!r}; choose one of {', '.join(SHAPINGS)}")
    rewards, mask, cells = _table(episode, players)
    arguments: dict[str, Any] = dict(options)
    if shaping == "with_outcome":
        if episode.outcome is None:
            raise UserError("shaped: with_outcome needs an outcome; make this node depend on the node that grades")
        arguments = {"outcome": torch.tensor([episode.outcome], dtype=rewards.dtype), **arguments}
    try:
        shaped_rewards = SHAPINGS[shaping](rewards, mask, **arguments)
    except TypeError as error:
        raise UserError(f"shaped: {shaping} has other options: {error}") from error
    return _by_agent(episode.calls, _per_call(shaped_rewards - rewards, cells))


@Catalogued(
    "MAPoRL, arXiv 2502.18439",
    "a debate of at least two players and two turns, scores in [0, 1], one weight above 0",
    peers=True,
)
def debate_incentives(
    episode: Episode,
    *,
    follow: Annotated[float, Field(ge=0.0)] = 0.0,
    leave: Annotated[float, Field(ge=0.0)] = 0.0,
    repel: Annotated[float, Field(ge=0.0)] = 0.0,
    attract: Annotated[float, Field(ge=0.0)] = 0.0,
    threshold: float = 0.5,
    players: Annotated[Players, Field(min_length=2)] | None = None,
) -> dict[str, list[float]]:
    """Add MAPoRL's incentives (credit/incentive.py) to the rewards of a debate, which must be scores. `players` as in
    `shaped`."""
    rewards, mask, cells = _table(episode, players)
    weights = Incentives(follow=follow, leave=leave, repel=repel, attract=attract)
    bonus = incentives(rewards, mask, weights, threshold=threshold)
    return _by_agent(episode.calls, _per_call(bonus, cells))


@Catalogued("MARTI", "a node that judges another one, whose reward says whether it was right")
def conditional_quality(
    episode: Episode,
    *,
    verifier: NodeName,
    generator: NodeName,
    key: str = "verdict",
    right: Scalar = True,
    threshold: float = 0.5,
) -> dict[str, list[float]]:
    """Replace the reward of every call of the node `verifier` with 1 if its verdict is true, else 0 (MARTI).

    The verdict is on the last call of `generator` before it: `parsed[key]` equal to `right` says that this call was
    right, and the verdict is true if that agrees with a reward of at least `threshold`. Without a verdict, or without a
    call to judge, the reward does not change.
    """
    rewards, mask, cells = _table(episode, None)
    verdicts, judged = torch.full_like(rewards, torch.nan), torch.full_like(rewards, torch.nan)
    judged_reward = None
    for call, cell in zip(episode.calls, cells, strict=True):
        if call.node == generator:
            judged_reward = None if call.unscored else call.reward or 0.0
        elif call.node != verifier or cell is None:  # an unscored call is in no cell
            continue
        elif judged_reward is not None and call.parsed.get(key) is not None:
            verdicts[cell] = float(normalized(call.parsed[key]) == normalized(right))
            judged[cell] = judged_reward
    qualities = shapings.conditional_quality(rewards, mask, verdicts, judged, threshold=threshold)
    return _by_agent(episode.calls, _per_call(qualities - rewards, cells))


@Catalogued("difference rewards", "a vote among rollout nodes; with a VOTE node: its dependencies, key and ties")
def vote_marginals(
    episode: Episode,
    *,
    voters: Annotated[NodeNames, Field(min_length=2)],
    key: str = "answer",
    ties: Literal["first", "none"] = "first",
    weight: float = 1.0,
) -> dict[str, list[float]]:
    """Replace the reward of each voter's last call with `weight` times its marginal contribution to the vote.

    That is the value of the vote's result with the voter's ballot, minus its value without it. The value of a ballot is
    the mean reward of the voters that cast it; ballots are equal if a VOTE node counts them as equal. A voter that was
    not called abstains. `voters` are a VOTE node's dependencies, in their order.

    Sets `episode.info["contribution/<node>"]` to the contribution (0.0 if the voter abstained); its mean,
    `info/contribution/<node>` in the metrics, is the leave-one-agent-out report.
    """
    last: dict[str, int] = {}
    for index, call in enumerate(episode.calls):
        if call.node in voters and not call.unscored:
            last[call.node] = index
    answers = [episode.calls[last[node]].parsed.get(key) if node in last else None for node in voters]
    ballots = [None if answer is None else normalized(answer) for answer in answers]
    rewards_of: dict[str, list[float]] = {}
    for node, ballot in zip(voters, ballots, strict=True):
        if ballot is not None:
            rewards_of.setdefault(ballot, []).append(episode.calls[last[node]].reward or 0.0)
    worth: dict[Hashable, float] = {ballot: fsum(rewards) / len(rewards) for ballot, rewards in rewards_of.items()}
    change = [0.0] * len(episode.calls)
    for node, marginal in zip(voters, marginals(ballots, worth, ties), strict=True):
        episode.info[f"contribution/{node}"] = marginal
        if node in last:
            change[last[node]] = weight * marginal - (episode.calls[last[node]].reward or 0.0)
    return _by_agent(episode.calls, change)


Cell = tuple[int, int, int]
"""Index of a call in a reward table [1, T, A]."""


def _table(episode: Episode, players: Players | None) -> tuple[torch.Tensor, torch.Tensor, list[Cell | None]]:
    """Return rewards [1, T, A], their mask, and the cell of each call (None for a call of no player).

    T runs over (turn, stage, round) in the order of the calls, A over the players.
    """
    lists = players or [[node] for node in dict.fromkeys(call.node for call in episode.calls)]
    stages: dict[str, int] = {}
    columns: dict[str, int] = {}
    for column, nodes in enumerate(lists):
        for stage, node in enumerate(nodes):
            columns[node], stages[node] = column, stage
    times = dict.fromkeys((call.turn, stages[call.node], call.round) for call in episode.calls if call.node in stages)
    order = {time: index for index, time in enumerate(times)}
    rewards = torch.zeros(1, max(1, len(order)), len(lists), dtype=torch.float64)
    mask = torch.zeros_like(rewards, dtype=torch.bool)
    cells: list[Cell | None] = []
    for call in episode.calls:
        cell = None
        if call.node in stages and not call.unscored:
            cell = (0, order[call.turn, stages[call.node], call.round], columns[call.node])
            rewards[cell], mask[cell] = call.reward or 0.0, True
        cells.append(cell)
    return rewards, mask, cells


def _per_call(values: torch.Tensor, cells: Sequence[Cell | None]) -> list[float]:
    return [0.0 if cell is None else values[cell].item() for cell in cells]


def _by_agent(calls: Sequence[Call], values: Sequence[float]) -> dict[str, list[float]]:
    by_agent: dict[str, list[float]] = {}
    for call, value in zip(calls, values, strict=True):
        by_agent.setdefault(call.agent, []).append(value)
    return by_agent

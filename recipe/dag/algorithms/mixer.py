"""The mixer of VDN and QMIX: how the team's value is learned on the driver.

Invariant: in a workflow that passes the checks, no baseline reads a message that may have reacted to the message it is
for, and every key of `mixer` has an effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from recipe.dag.algorithms.blocks import Block
from recipe.dag.algorithms.facts import Facts
from recipe.dag.core.frozen import Frozen
from recipe.dag.core.problem import KeyPath, Problem
from recipe.dag.credit.causality import Graph, descendants, in_baseline, reacting
from recipe.dag.types.model import Model
from recipe.dag.types.move import Move

PATH: KeyPath = ("algorithm", "mixer")


class Encoder(Frozen):
    """Turns texts into vectors for a mixer: the last hidden state of a frozen model, averaged over chunks."""

    model: Model | None = None
    """A language or embedding model; if absent, the initial model of the first trained policy."""
    chunk: int = Field(default=512, ge=1)
    """Tokens that it reads at once. A longer text is read in pieces; none of it is cut off."""


class Mixer(Block):
    """The model of the team's value of vdn and qmix. All of it is learned on the driver, from whole messages; only the
    encoder is a language model."""

    hidden: int = Field(default=64, ge=1)
    """Width of the network that computes the utility of a message."""
    lr: float = Field(default=1e-3, gt=0.0)
    epochs: int = Field(default=4, ge=1)
    """Passes over a step's episodes and those of the replayed steps."""
    batch_size: int = Field(default=64, ge=1)
    """Turns of episodes per optimizer step."""
    steps_per_epoch: int = Field(default=40, ge=1)
    """Upper limit of optimizer steps: with more turns than these batches hold, batches are larger."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    replay_steps: int = Field(default=4, ge=0)
    """Number of earlier steps whose episodes are learned again; older ones come from outdated policies."""
    gamma_turn: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount of the team's reward per turn."""
    lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """1: the team's value is fitted to the observed returns (Monte Carlo). Below 1: to TD(lambda) targets over turns,
    from a slow copy of utilities and mixer."""
    target_tau: float = Field(default=0.01, gt=0.0, le=1.0)
    """With lam below 1: how far the slow copy moves towards the learner after each optimizer step."""
    loss: Literal["squared", "binary"] = "squared"
    """Loss of the team's value against its return. binary: the value is a probability, fitted by cross entropy; the
    team's return from each turn on must lie in [0, 1]."""
    form: Literal["control_variate", "counterfactual", "sloped"] = "control_variate"
    """control_variate: the team's return minus its expectation without this message, which leaves the expected gradient
    unchanged whatever the mixer learned (with `scale: std` only up to the group's deviation, which siblings share, as
    in grpo). counterfactual: the team value with the message minus that with the siblings' messages in its place.
    sloped: the message's utility minus its siblings', times the slope of the team value in it."""
    full_at: float = Field(default=0.5, gt=0.0, le=1.0)
    """Held-out explained variance from which on all credit comes from the mixer; at or below 0 the mixer gets weight 0.
    """
    encoder: Encoder = Encoder()
    peers: dict[str, tuple[str, ...]] = {}
    """Node -> the nodes whose messages its baseline may read; if absent, every call that cannot react to its own."""

    @property
    def widths(self) -> dict[str, int]:
        """Widths of the networks, by option."""
        return self.model_dump(include={"hidden", "mixing_hidden"})

    def check_options(self, facts: Facts) -> Iterator[Problem]:
        if self.lam == 1.0 and facts.has(*PATH, "target_tau"):
            message = "with `lam: 1` there is no slow copy; remove it, or lower lam"
            yield facts.problem((*PATH, "target_tau"), message, key=True)
        if facts.one_turn:
            for key in ("lam", "gamma_turn"):
                if facts.has(*PATH, key):
                    message = "has no effect with `episode.max_turns: 1`, since no later turn pays; remove it"
                    yield facts.problem((*PATH, key), message, key=True)
        if facts.algorithm.drop_zero_variance:
            message = "a mixer learns from groups with equal returns, too; remove it"
            yield facts.problem(("algorithm", "drop_zero_variance"), message, key=True)

    def check(self, facts: Facts) -> Iterator[Problem]:
        """Yield the entries of `peers` that no baseline may read."""
        if not self.peers or not facts.ordered:
            return
        graph = facts.reactions()
        moves: dict[str, list[Move]] = {}
        for move in facts.moves():
            moves.setdefault(move.node, []).append(move)
        for name, peers in self.peers.items():
            path = (*PATH, "peers", name)
            if name not in moves:
                yield facts.problem(path, _no_call(facts, path, name), key=True)
                continue
            for index, peer in enumerate(peers):
                if peer not in moves:
                    message = _no_call(facts, (*path, index), peer)
                elif peer in peers[:index]:
                    message = f"`{peer}` is listed twice"
                else:
                    message = _reaction(graph, moves[name], moves[peer])
                if message is not None:
                    yield facts.problem((*path, index), message)


def _no_call(facts: Facts, path: KeyPath, name: str) -> str:
    """Return why a mixer reads no message of the node `name`."""
    if all(node.id != name for node in facts.nodes):
        return facts.no_node(path, name)
    return f"`{name}` is not a rollout node, and a mixer values the messages of those"


def _reaction(graph: Graph, own: list[Move], peers: list[Move]) -> str | None:
    """Return why a baseline for the moves `own` of one node may not read a node's moves `peers`: the nearest move that
    may react to them. None if it may."""
    if own == peers:
        return in_baseline("its own message")
    after = descendants(graph, [move.id for move in own])
    reactions = [
        (peer.turn - move.turn, max(0, peer.round - move.round), peer)
        for move in own
        for peer in peers
        if peer.id in after[move.id]
    ]
    if not reactions:
        return None
    turns, rounds, nearest = min(reactions)
    when = " of a later turn" if turns else " of a later round" if rounds else ""
    return in_baseline(reacting(f"`{nearest.node}`{when}"))


class QmixMixer(Mixer):
    mixing_hidden: int = Field(default=32, ge=1)
    """Width of the mixing network."""

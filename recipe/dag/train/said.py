"""Episodes as a mixer reads them: who could say what, and what was said.

Invariant: pure but for the encoder. A call that was not made is none, not an empty text; rewards are the team's, each
counted once, whoever got them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from recipe.dag.causality import check_baseline
from recipe.dag.credit.mixer import Encoder
from recipe.dag.credit.mixer_credit import peers_of
from recipe.dag.credit.mixer_data import Encoded, Layout
from recipe.dag.episode.record import Call, Episode
from recipe.dag.errors import UserError
from recipe.dag.workflow.moves import Move, reactions
from recipe.dag.workflow.schema import Workflow


def move_of(call: Call) -> Move:
    return Move(call.node, call.turn, call.round)


def encoded(episodes: Sequence[Episode], moves: Sequence[Move], encoder: Encoder) -> Encoded:
    """Each text is encoded once. Raises UserError for a vector that is not finite."""
    columns = {move: column for column, move in enumerate(moves)}
    index: dict[str, int] = {}
    groups: dict[str, int] = {}
    message = torch.full((len(episodes), len(moves)), -1)
    rewards = torch.zeros(len(episodes), 1 + max(move.turn for move in moves), dtype=torch.float64)
    question, group, turns = [], [], []
    for row, episode in enumerate(episodes):
        question.append(index.setdefault(question_of(episode), len(index)))
        group.append(groups.setdefault(episode.uid, len(groups)))
        turns.append(1 + max(call.turn for call in episode.calls))
        for call in episode.calls:
            message[row, columns[move_of(call)]] = index.setdefault(call.text, len(index))
        for turn in range(turns[-1]):
            earned = (call.reward or 0.0 for call in episode.calls if call.turn == turn)
            rewards[row, turn] = math.fsum(earned)
    texts = list(index)
    vectors = encoder(texts).float()
    if not torch.isfinite(vectors).all():
        bad = texts[int((~torch.isfinite(vectors).all(1)).nonzero()[0])]
        raise UserError(f"algorithm.mixer.encoder: a feature of {bad[:80]!r} is not finite; name another model")
    return Encoded(
        vectors, torch.tensor(question), message, rewards, turns=torch.tensor(turns), group=torch.tensor(group)
    )


def layout_of(workflow: Workflow, moves: Sequence[Move]) -> Layout:
    """One role per node. Raises UserError for peers that could react."""
    graph = reactions(workflow.nodes, workflow.loops, workflow.agents, workflow.episode.max_turns)
    ids, nodes = [move.id for move in moves], [move.node for move in moves]
    peers = peers_of(graph, ids)
    for node, allowed in workflow.algorithm.team_value.peers.items():
        mine = torch.tensor([name == node for name in nodes])
        peers[mine] &= torch.tensor([name in allowed for name in nodes])
    for call, row in zip(ids, peers.tolist(), strict=True):
        check_baseline(graph, call, [other for other, read in zip(ids, row, strict=True) if read])
    names = list(dict.fromkeys(nodes))
    return Layout(tuple(names.index(name) for name in nodes), tuple(move.turn for move in moves), peers)


def question_of(episode: Episode) -> str:
    """What all siblings were asked."""
    return "\n\n".join(str(message["content"]) for message in episode.sample["prompt"])

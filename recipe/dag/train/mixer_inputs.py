"""Episodes as a mixer reads them: the calls that can be made, and the texts of those that were.

Invariant: pure except for the encoder. A call that was not made has no text, which differs from an empty one. Rewards
are the team's: every call's reward counts once, whichever agent it was paid to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recipe.dag.core.errors import UserError
from recipe.dag.credit.causality import check_baseline
from recipe.dag.credit.joint_advantages import baseline_inputs
from recipe.dag.credit.mixer_batch import CallLayout, MixerBatch
from recipe.dag.types.move import Move
from recipe.dag.types.record import Call, Episode
from recipe.dag.workflow.moves import reactions
from recipe.dag.workflow.schema import Workflow

Encoder = Callable[[Sequence[str]], Tensor]
"""Turns texts into features, [K, D], with frozen weights."""


def move_of(call: Call) -> Move:
    return Move(call.node, call.turn, call.round)


def encode_episodes(episodes: Sequence[Episode], moves: Sequence[Move], encoder: Encoder) -> MixerBatch:
    """Return the episodes as a batch whose columns are `moves`; each different text is encoded once. Raises UserError
    for a feature that is not finite."""
    columns = {move: column for column, move in enumerate(moves)}
    index_of_text: dict[str, int] = {}
    index_of_uid: dict[str, int] = {}
    message_EA = torch.full((len(episodes), len(moves)), -1)
    rewards_ET = torch.zeros(len(episodes), 1 + max(move.turn for move in moves), dtype=torch.float64)
    question, group, turns = [], [], []
    for row, episode in enumerate(episodes):
        question.append(index_of_text.setdefault(question_of(episode), len(index_of_text)))
        group.append(index_of_uid.setdefault(episode.uid, len(index_of_uid)))
        turns.append(1 + max(call.turn for call in episode.calls))
        for call in episode.calls:
            message_EA[row, columns[move_of(call)]] = index_of_text.setdefault(call.text, len(index_of_text))
        for turn in range(turns[-1]):
            rewards = (call.reward or 0.0 for call in episode.calls if call.turn == turn)
            rewards_ET[row, turn] = math.fsum(rewards)
    texts = list(index_of_text)
    vectors_KD = encoder(texts).float()
    if not torch.isfinite(vectors_KD).all():
        text = texts[int((~torch.isfinite(vectors_KD).all(1)).nonzero()[0])]
        raise UserError(f"algorithm.mixer.encoder: a feature of {text[:80]!r} is not finite; name another model")
    return MixerBatch(
        vectors_KD, torch.tensor(question), message_EA, rewards_ET, turns=torch.tensor(turns), group=torch.tensor(group)
    )


def call_layout(workflow: Workflow, moves: Sequence[Move]) -> CallLayout:
    """Return the layout of the columns `moves`, with one role per node. Raises UserError for a baseline that would read
    a call that may react."""
    mixer = workflow.algorithm.team_value
    assert mixer is not None, "only vdn and qmix have a layout"
    graph = reactions(workflow.nodes, workflow.loops, workflow.agents, workflow.episode.max_turns)
    ids, nodes = [move.id for move in moves], [move.node for move in moves]
    allowed_AA = baseline_inputs(graph, ids)
    for node, allowed_nodes in mixer.peers.items():  # the workflow may narrow what the node's baselines read
        of_node = torch.tensor([name == node for name in nodes])
        allowed_AA[of_node] &= torch.tensor([name in allowed_nodes for name in nodes])
    for call, allowed in zip(ids, allowed_AA.tolist(), strict=True):
        check_baseline(graph, call, [other for other, is_read in zip(ids, allowed, strict=True) if is_read])
    names = list(dict.fromkeys(nodes))
    return CallLayout(tuple(names.index(name) for name in nodes), tuple(move.turn for move in moves), allowed_AA)


def question_of(episode: Episode) -> str:
    """Return the sample's prompt, which all siblings share."""
    return "\n\n".join(str(message["content"]) for message in episode.sample["prompt"])

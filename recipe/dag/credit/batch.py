"""One policy's rows as columns over calls.

Invariant: the call is the unit. The calls of a row tile its response tokens, and the rows lie end to end with no
padding, so neither padding nor the merging of rows can change what an estimator computes. Rewards are finite and kept
in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from recipe.dag.episode.row import Row


@dataclass(frozen=True)
class CreditBatch:
    """B rows with C calls and N response tokens in all."""

    uid: tuple[str, ...]
    """[C], as are the next four."""
    episode: tuple[int, ...]
    agent: tuple[str, ...]
    turn: tuple[int | None, ...]
    """None: a merged row that does not say."""
    node: tuple[str, ...]
    rewards: Tensor
    """[C] float64."""
    row_of_call: tuple[int, ...]
    """[C] index of the row that holds the call."""
    call_lengths: Tensor
    """[C] int64, response tokens; sums to N."""
    row_lengths: tuple[int, ...]
    """[B] response tokens; sums to N."""
    mask: Tensor
    """[N] bool, True where the policy sampled the token."""

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> CreditBatch:
        """Raises ValueError, naming uid, episode and agent, for a reward that is not finite, calls that do not tile
        their row, and rows of more than one policy."""
        policies = sorted({row.policy for row in rows})
        if len(policies) > 1:
            raise ValueError(f"credit is computed per policy, but the rows are of {', '.join(policies)}")
        uid, episode, agent, turn, node, rewards, row_of_call, call_lengths = [], [], [], [], [], [], [], []
        for index, row in enumerate(rows):
            _check(row)
            count = len(row.call_ends)
            uid += [row.uid] * count
            episode += [row.episode] * count
            agent += [row.agent] * count
            turn += row.call_turns or ([row.turn] if count == 1 else [None] * count)
            node += [row.node] * count
            rewards += row.call_rewards
            row_of_call += [index] * count
            call_lengths += [end - start for start, end in zip((0, *row.call_ends), row.call_ends, strict=False)]
        mask = torch.tensor([bit for row in rows for bit in row.response_mask], dtype=torch.bool)
        return cls(
            uid=tuple(uid),
            episode=tuple(episode),
            agent=tuple(agent),
            turn=tuple(turn),
            node=tuple(node),
            rewards=torch.tensor(rewards, dtype=torch.float64),
            row_of_call=tuple(row_of_call),
            call_lengths=torch.tensor(call_lengths, dtype=torch.int64),
            row_lengths=tuple(len(row.response_mask) for row in rows),
            mask=mask,
        )

    def spread(self, values: Tensor) -> Tensor:
        """[C] per call -> [N] per token, 0 where the mask is 0."""
        return values.repeat_interleave(self.call_lengths) * self.mask

    def per_row(self, tokens: Tensor) -> list[Tensor]:
        """[N] -> B tensors, float32, each as long as its row's response."""
        return list(tokens.to(torch.float32).split(list(self.row_lengths)))


def _check(row: Row) -> None:
    where = f"row of uid {row.uid}, episode {row.episode}, agent {row.agent}"
    ends = row.call_ends
    if not len(ends) == len(row.call_rewards):
        raise ValueError(f"{where}: {len(ends)} calls but {len(row.call_rewards)} call rewards")
    if row.call_turns and len(row.call_turns) != len(ends):
        raise ValueError(f"{where}: {len(ends)} calls but {len(row.call_turns)} call turns")
    if list(ends) != sorted(ends) or ends[0] < 0 or ends[-1] != len(row.response_mask):
        raise ValueError(f"{where}: call_ends {ends} do not tile a response of {len(row.response_mask)} tokens")
    for reward in row.call_rewards:
        if not math.isfinite(reward):
            raise ValueError(f"{where}: reward {reward} is not finite")

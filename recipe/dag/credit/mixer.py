"""Value mixing: a team value made of one utility per call, to divide a team's reward (VDN, arXiv 1706.05296; QMIX,
arXiv 1803.11485).

Invariant: the team value never falls when a utility rises, because the mixing weights are absolute values; a call that
did not take place adds nothing. The utilities are of whole messages: texts have no argmax, so nothing here chooses
actions; `mixer_credit` turns values into advantages of a policy gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipe.dag.credit.options import check_units


class Encoder(Protocol):
    """Texts to features, frozen."""

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """[B, D], one row per text."""


class LastHiddenState:
    """The default encoder: the last token's hidden state of a frozen language model, averaged over chunks, so that the
    end of a long text counts like its beginning and nothing is cut off. Which texts share a batch depends on the texts
    of the call alone, so the same call gives the same bits."""

    def __init__(
        self,
        tokenize: Callable[[str], list[int]],
        hidden: Callable[[Tensor, Tensor], Tensor],
        *,
        chunk: int = 512,
        batch_tokens: int = 16384,
    ):
        """`tokenize`: text -> at least one token id. `hidden`: ids [B, L] and mask [B, L] (1: a token, 0: padding on
        the right) -> last layer's states [B, L, D]. `chunk`: tokens that the model reads at once. `batch_tokens`: at
        most so many in a batch, padding included."""
        if chunk < 1:
            raise ValueError(f"chunk: {chunk} is not at least 1")
        self.tokenize, self.hidden, self.chunk, self.batch_tokens = tokenize, hidden, chunk, batch_tokens

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        chunks = [torch.tensor(self.tokenize(text)).split(self.chunk) for text in texts]
        pieces = [piece for text in chunks for piece in text]
        order = sorted(range(len(pieces)), key=lambda index: len(pieces[index]))
        states: list[Tensor] = [torch.empty(0)] * len(pieces)
        while order:
            # the longest first, so that what does not fit fails at once
            count = max(1, self.batch_tokens // len(pieces[order[-1]]))
            batch, order = order[-count:], order[:-count]
            for index, state in zip(batch, self._last([pieces[index] for index in batch]), strict=True):
                states[index] = state
        return torch.stack([torch.stack(part).mean(0) for part in _parts(states, [len(text) for text in chunks])])

    def _last(self, pieces: Sequence[Tensor]) -> Tensor:
        """[B, D]"""
        lengths = torch.tensor([len(piece) for piece in pieces])
        ids = torch.nn.utils.rnn.pad_sequence(list(pieces), batch_first=True)
        mask = (torch.arange(ids.shape[1]) < lengths.unsqueeze(1)).long()
        return self.hidden(ids, mask)[torch.arange(len(ids)), lengths - 1].float().cpu()


def _parts(items: Sequence[Tensor], counts: Sequence[int]) -> Iterator[Sequence[Tensor]]:
    start = 0
    for count in counts:
        yield items[start : start + count]
        start += count


class Utility(nn.Module):
    """Features [..., D] of one call (state and message, encoded) to its utility [...]. Calls of a role share one."""

    def __init__(self, features: int, hidden: int = 64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features).squeeze(-1)


class VDN(nn.Module):
    """The sum of the utilities."""

    def forward(self, utilities: Tensor, state: Tensor, mask: Tensor) -> Tensor:
        """utilities [..., N], state [..., S] (not read), mask [..., N] (the call took place) -> [...]"""
        return torch.where(mask, utilities, 0.0).sum(-1)


class QMIX(nn.Module):
    """A two-layer network over the utilities whose weights are functions of the state and not negative."""

    def __init__(self, state: int, agents: int, hidden: int = 32):
        super().__init__()
        self.agents, self.hidden = agents, hidden
        self.weight_in = nn.Linear(state, agents * hidden)
        self.bias_in = nn.Linear(state, hidden)
        self.weight_out = nn.Linear(state, hidden)
        self.value = nn.Sequential(nn.Linear(state, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    @staticmethod
    def positive(weights: Tensor) -> Tensor:
        return weights.abs()

    def forward(self, utilities: Tensor, state: Tensor, mask: Tensor) -> Tensor:
        """utilities [..., N], state [..., S], mask [..., N] (the call took place) -> [...]"""
        weight_in = self.positive(self.weight_in(state)).unflatten(-1, (self.agents, self.hidden))
        present = torch.where(mask, utilities, 0.0).unsqueeze(-2)
        inner = functional.elu((present @ weight_in).squeeze(-2) + self.bias_in(state))
        return (inner * self.positive(self.weight_out(state))).sum(-1) + self.value(state).squeeze(-1)


class Target:
    """A frozen copy of critics and mixer, equal to them from the first moment on."""

    def __init__(self, online: nn.Module):
        self.module = copy.deepcopy(online).requires_grad_(False).eval()

    @torch.no_grad()
    def follow(self, online: nn.Module, tau: float = 1.0) -> None:
        """Go `tau` of the way to the online weights; 1 copies them."""
        check_units(tau=tau)
        for mine, theirs in zip(self.module.state_dict().values(), online.state_dict().values(), strict=True):
            mine.copy_(torch.lerp(mine, theirs, tau) if mine.is_floating_point() and tau < 1.0 else theirs)


def td_targets(rewards: Tensor, values: Tensor, turns: Tensor, *, gamma_turn: float = 1.0, lam: float = 1.0) -> Tensor:
    """Targets [E, T] of the team value, without gradient. `rewards` [E, T]: the team's, per turn; `values` [E, T]: the
    target's team value of the calls of each turn; `turns` [E]: how many each episode had. The last turn's target is its
    reward; before it, r_t + gamma_turn ((1 - lam) Q'_{t+1} + lam y_{t+1}). lam = 1 is the Monte-Carlo return, which
    reads no values. 0 behind an episode's end."""
    check_units(gamma_turn=gamma_turn, lam=lam)
    values, out = values.detach(), torch.zeros_like(rewards)
    for t in range(rewards.shape[1] - 1, -1, -1):
        target = rewards[:, t]
        if t + 1 < rewards.shape[1]:
            following = lam * out[:, t + 1] + ((1.0 - lam) * values[:, t + 1] if lam < 1.0 else 0.0)
            target = target + gamma_turn * torch.where(turns > t + 1, following, 0.0)
        out[:, t] = torch.where(turns > t, target, 0.0)
    return out.detach()


def team_loss(predicted: Tensor, target: Tensor, *, binary: bool = False) -> Tensor:
    """Mean squared error; for rewards of 0 and 1, cross entropy of the sigmoid of the team value."""
    if binary:
        return functional.binary_cross_entropy_with_logits(predicted, target)
    return functional.mse_loss(predicted, target)

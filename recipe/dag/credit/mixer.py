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
    """A call's utility from its question, its message and a few features more. Calls of a role share one."""

    def __init__(self, dimension: int, more: int, hidden: int = 64):
        super().__init__()
        self.widths = (dimension, dimension, more)
        self.layers = nn.Sequential(nn.Linear(sum(self.widths), hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, questions: Tensor, messages: Tensor, more: Tensor, question: Tensor, message: Tensor) -> Tensor:
        """[M] of M calls: questions [Q, D] and messages [K, D], each different one once; more [M, F]; question [M] and
        message [M] say which one is whose."""
        first, bend, last = self.layers
        of_question, of_message, of_more = first.weight.split(self.widths, dim=1)
        inner = functional.linear(more, of_more, first.bias)
        inner = inner + functional.linear(questions, of_question).index_select(0, question)
        inner = inner + functional.linear(messages, of_message).index_select(0, message)
        return last(bend(inner)).squeeze(-1)


class VDN(nn.Module):
    """The sum of the utilities."""

    def forward(self, utilities: Tensor, state: Tensor, mask: Tensor, where: Tensor | None = None) -> Tensor:
        """utilities [..., N], state [..., S] and where (not read), mask [..., N] (the call took place) -> [...]"""
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

    def forward(self, utilities: Tensor, state: Tensor, mask: Tensor, where: Tensor | None = None) -> Tensor:
        """utilities [..., N], state [..., S], whose leading dimensions may be 1 where many share it, mask [..., N] (the
        call took place) -> [...]. `where` [V]: which of the states [U, S] is whose, with utilities [V, N]."""
        made = [self.positive(self.weight_in(state)), self.bias_in(state), self.positive(self.weight_out(state))]
        made.append(self.value(state))
        if where is not None:
            made = [one.index_select(0, where) for one in made]
        weight_in, bias_in, weight_out, value = made
        present = torch.where(mask, utilities, 0.0)
        inner = torch.einsum("...n,...nh->...h", present, weight_in.unflatten(-1, (self.agents, self.hidden)))
        return torch.einsum("...h,...h->...", functional.elu(inner + bias_in), weight_out) + value.squeeze(-1)


class Target:
    """A frozen copy of critics and mixer, equal to them from the first moment on."""

    def __init__(self, online: nn.Module):
        self.module = copy.deepcopy(online).requires_grad_(False).eval()

    @torch.no_grad()
    def follow(self, online: nn.Module, tau: float = 1.0) -> None:
        """Go `tau` of the way to the online weights; 1 copies them."""
        check_units(tau=tau)
        mine, theirs = list(self.module.parameters()), list(online.parameters())
        if tau < 1.0:
            torch._foreach_lerp_(mine, theirs, tau)
        else:
            torch._foreach_copy_(mine, theirs)


def team_loss(predicted: Tensor, target: Tensor, *, binary: bool = False) -> Tensor:
    """Mean squared error; for rewards of 0 and 1, cross entropy of the sigmoid of the team value."""
    if binary:
        return functional.binary_cross_entropy_with_logits(predicted, target)
    return functional.mse_loss(predicted, target)

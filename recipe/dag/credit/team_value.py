"""The team's value of what was said in a turn.

Invariant: pure. A team value of turn t reads the calls up to turn t and predicts the team's return from t on. Each
different text meets the weights once per batch, however many calls and turns hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recipe.dag.credit.mixer import QMIX, VDN, Utility, team_loss
from recipe.dag.credit.mixer_data import Encoded, Layout
from recipe.dag.credit.threads import one_thread

CLIP = 5.0
"""Standard deviations beyond which an encoded feature counts no more."""


@dataclass(frozen=True)
class Prepared:
    """E episodes' texts, each different one once, standardised."""

    questions: Tensor
    """[Q, D]"""
    question: Tensor
    """[E] int64, into questions."""
    messages: Tensor
    """[K, D]"""
    message: Tensor
    """[E, N] int64, into messages; -1: the call was not made."""


@dataclass(frozen=True)
class Parts:
    """What the mixer reads of P points (an episode's turns)."""

    utilities: Tensor
    """[P, N], 0 for a call that was not made by then."""
    state: Tensor
    """[U, S], each once: question and turn."""
    where: Tensor
    """[P] int64, into state."""
    made: Tensor
    """[P, N] bool, by then."""


class TeamValue(nn.Module):
    """Utilities and mixer over encoded calls. A call's features are the question, the message, its role, its turn and
    the turn that is valued; the state is the question and that turn. Questions, messages and returns are brought to
    mean 0 and variance 1 by what the first step's were, so that no option depends on the scale of the rewards.
    `binary`: the team's value is a probability, the sigmoid of what the mixer says."""

    def __init__(
        self,
        layout: Layout,
        dimension: int,
        *,
        mixer: str,
        hidden: int = 64,
        mixing_hidden: int = 32,
        binary: bool = False,
    ):
        super().__init__()
        self.layout, self.span, self.binary = layout, max(layout.turns) + 1, binary
        roles = torch.tensor(layout.roles)
        self.register_buffer("role", nn.functional.one_hot(roles).float(), persistent=False)
        self.register_buffer("turn", torch.tensor(layout.turns), persistent=False)
        for name in ("question", "message"):
            self.register_buffer(f"{name}_mean", torch.zeros(dimension))
            self.register_buffer(f"{name}_std", torch.ones(dimension))
        self.register_buffer("return_mean", torch.zeros(()))
        self.register_buffer("return_std", torch.ones(()))
        self.utility = Utility(dimension, self.role.shape[1] + 2, hidden)
        self.mixer = VDN() if mixer == "vdn" else QMIX(dimension + 1, len(layout.turns), mixing_hidden)

    @torch.no_grad()
    def standardise(self, data: Encoded) -> None:
        for name, vectors in (
            ("question", data.vectors[data.question.unique()]),
            ("message", data.vectors[data.message[data.message >= 0].unique()]),
        ):
            std = vectors.std(0, correction=0)
            getattr(self, f"{name}_mean").copy_(vectors.mean(0))
            getattr(self, f"{name}_std").copy_(torch.where(std > 1e-6, std, 1.0))

    @torch.no_grad()
    def standardise_returns(self, data: Encoded, returns: Tensor) -> None:
        """Not for probabilities, which have their scale."""
        if self.binary:
            return
        found = returns[data.points()].float()
        std = found.std(correction=0)
        self.return_mean.copy_(found.mean())
        self.return_std.copy_(torch.where(std > 1e-6, std, 1.0))

    @torch.no_grad()
    def prepared(self, data: Encoded) -> Prepared:
        asked, question = data.question.unique(return_inverse=True)
        made = data.message >= 0
        said, place = data.message[made].unique(return_inverse=True)
        message = torch.full_like(data.message, -1).masked_scatter(made, place)
        questions, messages = data.vectors.index_select(0, asked), data.vectors.index_select(0, said)
        return Prepared(self._scale("question", questions), question, self._scale("message", messages), message)

    def value(self, utilities: Tensor, state: Tensor, mask: Tensor) -> Tensor:
        """The team value [...], in units of the return; see VDN and QMIX."""
        return self.in_units(self.mixer(utilities, state, mask))

    def in_units(self, mixed: Tensor) -> Tensor:
        return torch.sigmoid(mixed) if self.binary else self.return_mean + self.return_std * mixed

    def loss(self, mixed: Tensor, goals: Tensor) -> Tensor:
        """Of what the mixer says to goals in units of the return."""
        if self.binary:  # a bootstrapped goal may leave the range
            return team_loss(mixed, goals.clamp(0.0, 1.0), binary=True)
        return team_loss(self.in_units(mixed), goals)

    def parts(self, data: Prepared, episode: Tensor, turn: Tensor) -> Parts:
        """Of the points (episode [P], turn [P])."""
        message = data.message[episode]
        made = (message >= 0) & (self.turn <= turn.unsqueeze(1))
        point, call = made.nonzero(as_tuple=True)
        asked, question = data.question[episode].unique(return_inverse=True)
        said, place = message[made].unique(return_inverse=True)
        questions = data.questions.index_select(0, asked)
        turns = torch.stack([self._fraction(self.turn)[call], self._fraction(turn)[point]], dim=1)
        found = self.utility(
            questions,
            data.messages.index_select(0, said),
            torch.cat([self.role[call], turns], dim=1),
            question[point],
            place,
        )
        utilities = found.new_zeros(made.shape).masked_scatter(made, found)
        valued, where = (question * self.span + turn).unique(return_inverse=True)
        state = self._state(questions.index_select(0, valued // self.span), valued % self.span)
        return Parts(utilities, state, where, made)

    def states(self, data: Prepared, episode: Tensor, turn: Tensor) -> Tensor:
        """[P, S] of the points (episode [P], turn [P])."""
        return self._state(data.questions[data.question[episode]], turn)

    def _state(self, questions: Tensor, turn: Tensor) -> Tensor:
        return torch.cat([questions, self._fraction(turn).unsqueeze(-1)], dim=-1)

    def _scale(self, name: str, vectors: Tensor) -> Tensor:
        """In place: they are as large as all that the encoder said."""
        vectors = vectors.sub_(getattr(self, f"{name}_mean")).div_(getattr(self, f"{name}_std"))
        return vectors.clamp_(-CLIP, CLIP)

    def _fraction(self, turn: Tensor) -> Tensor:
        return turn.float() / self.span


@one_thread()
@torch.no_grad()
def team_values(
    model: TeamValue, data: Encoded, prepared: Prepared | None = None, *, batch_size: int = 1024
) -> tuple[Tensor, Tensor]:
    """(team value of all calls up to each turn [E, T], utilities [E, T, N]); 0 behind an episode's end. `prepared`:
    the model's, or one of the same scales', where it is at hand."""
    prepared = prepared or model.prepared(data)
    episode, turn = data.points()
    values = torch.zeros(data.rewards.shape)
    utilities = torch.zeros(*values.shape, data.message.shape[1])
    for rows in torch.arange(len(episode)).split(batch_size):
        place = episode[rows], turn[rows]
        parts = model.parts(prepared, *place)
        values[place] = model.in_units(model.mixer(parts.utilities, parts.state, parts.made, parts.where))
        utilities[place] = parts.utilities
    return values, utilities

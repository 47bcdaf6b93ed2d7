"""The joint value of the messages of a turn, from their features.

Invariant: the joint value of turn t reads the calls up to turn t and predicts the team's return from t on. Each
different text is multiplied with the weights once per batch, however many calls and turns hold it. Nothing is learned
here (`mixer_fit`), except the scales of texts and returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recipe.dag.credit.mixer import QMIX, VDN, Utility, value_loss
from recipe.dag.credit.mixer_batch import CallLayout, MixerBatch

CLIP = 5.0
"""Standard deviations at which standardized features are clipped."""
MIN_STD = 1e-6
"""Features and returns with a smaller standard deviation are constant and only centered."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, then restore the number. With many small tensors, threads wait for each other longer
    than they work and, on a busy machine, take ten times as long. The results do not depend on the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class StandardizedTexts:
    """The texts of E episodes, each different one once, standardized."""

    questions: Tensor
    """[Q, D]"""
    question: Tensor
    """[E] int64, into questions."""
    messages: Tensor
    """[M, D]"""
    message: Tensor
    """[E, A] int64, into messages; -1: the call was not made."""


@dataclass(frozen=True)
class MixerInputs:
    """The mixer's inputs at P points (turns of episodes)."""

    utilities: Tensor
    """[P, A], 0 for a call that was not made by then."""
    state: Tensor
    """[U, Z], each different state once: question and turn."""
    state_index: Tensor
    """[P] int64, into state."""
    made: Tensor
    """[P, A] bool, True for the calls made by then."""


class JointValueNet(nn.Module):
    """Q_tot over encoded calls: utilities and a mixer. A call's features are the question, the message, its role, its
    turn and the turn that is valued; the state is the question and that turn. Questions, messages and returns are
    standardized with the statistics of the first step, so that no option depends on the scale of the rewards.
    `binary`: the joint value is a probability, the sigmoid of the mixer's output."""

    # buffers, which nn.Module's type does not know
    roles: Tensor  # [A, R] float, one-hot
    turns: Tensor  # [A] int64
    question_mean: Tensor  # [D], as the three below
    question_std: Tensor
    message_mean: Tensor
    message_std: Tensor
    return_mean: Tensor  # []
    return_std: Tensor  # []

    def __init__(
        self,
        layout: CallLayout,
        dimension: int,
        *,
        mixer: str,
        hidden: int,
        mixing_hidden: int | None = None,
        binary: bool,
    ):
        """`mixer`: vdn or qmix; `hidden`: width of the utility network; `mixing_hidden`: of QMIX's mixing network."""
        super().__init__()
        self.layout, self.span, self.binary = layout, max(layout.turns) + 1, binary
        roles = nn.functional.one_hot(torch.tensor(layout.roles)).float()
        # the layout is not part of a checkpoint: the workflow defines it
        self.register_buffer("roles", roles, persistent=False)
        self.register_buffer("turns", torch.tensor(layout.turns), persistent=False)
        for name in ("question", "message"):
            self.register_buffer(f"{name}_mean", torch.zeros(dimension))
            self.register_buffer(f"{name}_std", torch.ones(dimension))
        self.register_buffer("return_mean", torch.zeros(()))
        self.register_buffer("return_std", torch.ones(()))
        self.utility = Utility(dimension, roles.shape[1] + 2, hidden)
        if mixer == "vdn":
            self.mixer = VDN()
        else:
            assert mixing_hidden is not None, "qmix has the option mixing_hidden"
            self.mixer = QMIX(dimension + 1, len(layout.turns), mixing_hidden)

    @torch.no_grad()
    def fit_text_scale(self, batch: MixerBatch) -> None:
        """Set mean and standard deviation of questions and messages to those of the batch's different texts."""
        questions = batch.vectors[batch.question.unique()]
        messages = batch.vectors[batch.message[batch.message >= 0].unique()]
        self._set_scale(questions, self.question_mean, self.question_std)
        self._set_scale(messages, self.message_mean, self.message_std)

    @staticmethod
    def _set_scale(vectors: Tensor, mean: Tensor, std: Tensor) -> None:
        measured = vectors.std(0, correction=0)
        mean.copy_(vectors.mean(0))
        std.copy_(torch.where(measured > MIN_STD, measured, 1.0))

    @torch.no_grad()
    def fit_return_scale(self, batch: MixerBatch, returns_ET: Tensor) -> None:
        """Set mean and standard deviation of the returns to those of the played turns; probabilities stay as they
        are."""
        if self.binary:
            return
        returns_P = returns_ET[batch.points()].float()
        std = returns_P.std(correction=0)
        self.return_mean.copy_(returns_P.mean())
        self.return_std.copy_(torch.where(std > MIN_STD, std, 1.0))

    @torch.no_grad()
    def standardize(self, batch: MixerBatch) -> StandardizedTexts:
        question_ids, question_E = batch.question.unique(return_inverse=True)
        made_EA = batch.message >= 0
        message_ids, message_index = batch.message[made_EA].unique(return_inverse=True)
        message_EA = torch.full_like(batch.message, -1).masked_scatter(made_EA, message_index)
        questions_QD = batch.vectors.index_select(0, question_ids)
        messages_MD = batch.vectors.index_select(0, message_ids)
        # in place, on the copies that index_select made: these are as large as all that was encoded
        questions_QD.sub_(self.question_mean).div_(self.question_std).clamp_(-CLIP, CLIP)
        messages_MD.sub_(self.message_mean).div_(self.message_std).clamp_(-CLIP, CLIP)
        return StandardizedTexts(questions_QD, question_E, messages_MD, message_EA)

    def value(self, utilities: Tensor, state: Tensor, mask: Tensor) -> Tensor:
        """Return the joint value [...] in units of the return; arguments as in VDN and QMIX."""
        return self.to_return_units(self.mixer(utilities, state, mask))

    def to_return_units(self, mixed: Tensor) -> Tensor:
        return torch.sigmoid(mixed) if self.binary else self.return_mean + self.return_std * mixed

    def loss(self, mixed: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of the mixer's output for targets in units of the return."""
        if self.binary:  # a bootstrapped target may leave [0, 1]
            return value_loss(mixed, targets.clamp(0.0, 1.0), binary=True)
        return value_loss(self.to_return_units(mixed), targets, binary=False)

    def mixer_inputs(self, texts: StandardizedTexts, episode_P: Tensor, turn_P: Tensor) -> MixerInputs:
        """Return the mixer's inputs at the points (episode, turn)."""
        message_PA = texts.message[episode_P]
        made_PA = (message_PA >= 0) & (self.turns <= turn_P.unsqueeze(1))
        point, call = made_PA.nonzero(as_tuple=True)
        question_ids, question_P = texts.question[episode_P].unique(return_inverse=True)
        message_ids, message = message_PA[made_PA].unique(return_inverse=True)
        questions_QD = texts.questions.index_select(0, question_ids)
        messages_MD = texts.messages.index_select(0, message_ids)
        times = torch.stack([self._fraction(self.turns)[call], self._fraction(turn_P)[point]], dim=1)
        more = torch.cat([self.roles[call], times], dim=1)
        utilities = self.utility(questions_QD, messages_MD, more, question_P[point], message)
        utilities_PA = utilities.new_zeros(made_PA.shape).masked_scatter(made_PA, utilities)
        # question and turn as one number, whose different values are the different states
        state_ids, state_index_P = (question_P * self.span + turn_P).unique(return_inverse=True)
        state_UZ = self._state(questions_QD.index_select(0, state_ids // self.span), state_ids % self.span)
        return MixerInputs(utilities_PA, state_UZ, state_index_P, made_PA)

    def states(self, texts: StandardizedTexts, episode_P: Tensor, turn_P: Tensor) -> Tensor:
        """Return [P, Z] the state of each point (episode, turn)."""
        return self._state(texts.questions[texts.question[episode_P]], turn_P)

    def _state(self, questions: Tensor, turn: Tensor) -> Tensor:
        return torch.cat([questions, self._fraction(turn).unsqueeze(-1)], dim=-1)

    def _fraction(self, turn: Tensor) -> Tensor:
        return turn.float() / self.span


@one_thread()
@torch.no_grad()
def joint_values(
    model: JointValueNet, batch: MixerBatch, texts: StandardizedTexts | None = None
) -> tuple[Tensor, Tensor]:
    """Return (joint value of all calls up to each turn [E, T], utilities [E, T, A]); 0 after an episode's end. `texts`:
    those of the batch, from `model` or one with the same scales, if they are known already."""
    texts = texts or model.standardize(batch)
    episode_P, turn_P = batch.points()
    values_ET = torch.zeros(batch.rewards.shape)
    utilities_ETA = torch.zeros(*values_ET.shape, batch.message.shape[1])
    for points in torch.arange(len(episode_P)).split(1024):  # bounds the memory
        index = episode_P[points], turn_P[points]
        inputs = model.mixer_inputs(texts, *index)
        mixed_P = model.mixer(inputs.utilities, inputs.state, inputs.made, inputs.state_index)
        values_ET[index] = model.to_return_units(mixed_P)
        utilities_ETA[index] = inputs.utilities
    return values_ET, utilities_ETA

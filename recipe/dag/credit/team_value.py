"""The team's value of what was said in a turn, and the credit that it gives.

Invariant: pure. A team value of turn t reads the calls up to turn t and predicts the team's return from t on. Credit
reads weights as they are: whoever asks for it before the step's fit (`mixer_fit`) has baselines that never saw the
returns they are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recipe.dag.credit.mixer import QMIX, VDN, Utility, td_targets
from recipe.dag.credit.mixer_credit import control_variate, counterfactual, sloped

CLIP = 5.0
"""Standard deviations beyond which an encoded feature counts no more."""


@dataclass(frozen=True)
class Layout:
    """The N calls that an episode can hold."""

    roles: tuple[int, ...]
    """[N] Calls of one role share a utility."""
    turns: tuple[int, ...]
    """[N]"""
    peers: Tensor
    """[N, N] bool: call j may stand in call i's baseline."""

    @property
    def seen(self) -> Tensor:
        """[N, N] bool: call j is call i, or may stand in its baseline."""
        return self.peers | torch.eye(len(self.turns), dtype=torch.bool)


@dataclass(frozen=True)
class Encoded:
    """E episodes of at most T turns: what was said, as K vectors, and what it earned."""

    vectors: Tensor
    """[K, D]"""
    question: Tensor
    """[E] int64, into vectors."""
    message: Tensor
    """[E, N] int64, into vectors; -1: the call was not made."""
    rewards: Tensor
    """[E, T] float64, the team's per turn."""
    turns: Tensor
    """[E] int64, how many each episode had."""
    group: Tensor
    """[E] int64, equal for siblings."""

    def points(self) -> tuple[Tensor, Tensor]:
        """(episode [P], turn [P]) of every turn that was played."""
        return torch.nonzero(torch.arange(self.rewards.shape[1]) < self.turns.unsqueeze(1), as_tuple=True)


class TeamValue(nn.Module):
    """Utilities and mixer over encoded calls. A call's features are the question, the message, its role, its turn and
    the turn that is valued; the state is the question and that turn. Questions, messages and returns are brought to
    mean 0 and variance 1 by what the first step's were, so that no option depends on the scale of the rewards."""

    def __init__(self, layout: Layout, dimension: int, *, mixer: str, hidden: int = 64, mixing_hidden: int = 32):
        super().__init__()
        self.layout, self.span = layout, max(layout.turns) + 1
        roles = torch.tensor(layout.roles)
        self.register_buffer("role", nn.functional.one_hot(roles).float(), persistent=False)
        self.register_buffer("turn", torch.tensor(layout.turns), persistent=False)
        for name in ("question", "message"):
            self.register_buffer(f"{name}_mean", torch.zeros(dimension))
            self.register_buffer(f"{name}_std", torch.ones(dimension))
        self.register_buffer("return_mean", torch.zeros(()))
        self.register_buffer("return_std", torch.ones(()))
        self.utility = Utility(2 * dimension + self.role.shape[1] + 2, hidden)
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
        found = returns[data.points()].float()
        std = found.std(correction=0)
        self.return_mean.copy_(found.mean())
        self.return_std.copy_(torch.where(std > 1e-6, std, 1.0))

    def value(self, utilities: Tensor, state: Tensor, mask: Tensor) -> Tensor:
        """The team value [...], in units of the return; see VDN and QMIX."""
        return self.return_mean + self.return_std * self.mixer(utilities, state, mask)

    def parts(self, data: Encoded, episode: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(utilities [P, N], state [P, S], calls made by then [P, N]) of the points (episode [P], turn [P])."""
        message = data.message[episode]
        made = (message >= 0) & (self.turn <= turn.unsqueeze(1))
        question = self._scaled("question", data.vectors[data.question[episode]])
        said = self._scaled("message", data.vectors[message.clamp_min(0)])
        points, calls = message.shape
        features = torch.cat(
            [
                question.unsqueeze(1).expand(-1, calls, -1),
                torch.where(made.unsqueeze(-1), said, 0.0),
                self.role.expand(points, -1, -1),
                self._fraction(self.turn).expand(points, -1).unsqueeze(-1),
                self._fraction(turn).unsqueeze(1).expand(-1, calls).unsqueeze(-1),
            ],
            dim=-1,
        )
        state = torch.cat([question, self._fraction(turn).unsqueeze(-1)], dim=-1)
        return self.utility(features), state, made

    def _scaled(self, name: str, vectors: Tensor) -> Tensor:
        away = (vectors - getattr(self, f"{name}_mean")) / getattr(self, f"{name}_std")
        return away.clamp(-CLIP, CLIP)

    def _fraction(self, turn: Tensor) -> Tensor:
        return turn.float() / self.span


@torch.no_grad()
def team_values(model: TeamValue, data: Encoded, *, batch_size: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    """(team value of all calls up to each turn [E, T], utilities [E, T, N], state [E, T, S]); 0 behind an episode's
    end."""
    episode, turn = data.points()
    count, turns = data.rewards.shape
    found: list[Tensor] = []
    for where in torch.arange(len(episode)).split(batch_size):
        utilities, state, made = model.parts(data, episode[where], turn[where])
        value = model.value(utilities, state, made)
        found.append(torch.cat([value.unsqueeze(-1), utilities, state], dim=-1))
    grid = torch.zeros(count, turns, found[0].shape[-1])
    grid[episode, turn] = torch.cat(found)
    calls = data.message.shape[1]
    return grid[..., 0], grid[..., 1 : 1 + calls], grid[..., 1 + calls :]


def returns_of(data: Encoded, *, gamma_turn: float = 1.0) -> Tensor:
    """[E, T] float64, what the team earned from each turn on; 0 behind an episode's end."""
    return td_targets(data.rewards, data.rewards, data.turns, gamma_turn=gamma_turn)


def among_siblings(values: Tensor, data: Encoded) -> Tensor:
    """[P] float64: values [E, T] of the turns that were played, less the mean of those siblings' that played it."""
    episode, turn = data.points()
    found = values.double()[episode, turn]
    _, group = torch.stack([data.group[episode], turn]).unique(dim=1, return_inverse=True)
    totals = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add(0, group, found)
    return found - (totals / group.bincount())[group]


def credit(model: TeamValue, data: Encoded, returns: Tensor, *, form: str = "control_variate") -> Tensor:
    """[E, N] float64: what each call is credited with, 0 for one that was not made and, by control variate, for one
    that no sibling made. `returns` [E, T]: see `returns_of`."""
    _, utilities, state = team_values(model, data)
    out = torch.zeros(data.message.shape, dtype=torch.float64)
    peers, turn_of, seen = model.layout.peers, model.turn, model.layout.seen
    for group in data.group.unique():
        members = (data.group == group).nonzero().flatten()
        for turn in range(int(data.turns[members].max())):
            calls = (turn_of == turn).nonzero().flatten().tolist()
            there = members[data.turns[members] > turn]
            made = (data.message[there] >= 0) & (turn_of <= turn)
            given = (utilities[there, turn], state[there[0], turn])
            if form == "control_variate":
                found = control_variate(model.value, *given, peers, made, returns[there, turn].float(), calls)
            elif form == "counterfactual":
                found = counterfactual(model.value, *given, peers, made, calls)
            else:
                found = torch.zeros(made.shape)
                for call in calls:  # a slope, too, must not depend on what comes after
                    found[:, call] = sloped(model.value, *given, made & seen[call])[:, call]
            out[there.unsqueeze(1), torch.tensor(calls)] = found[:, calls].double()
    return out


def joined(parts: Sequence[Encoded]) -> Encoded:
    """As one. Siblings of different parts stay strangers."""
    fields: dict[str, list[Tensor]] = {name: [] for name in Encoded.__dataclass_fields__}
    vectors = groups = 0
    for part in parts:
        shifted = {
            "question": part.question + vectors,
            "message": torch.where(part.message >= 0, part.message + vectors, -1),
            "group": part.group + groups,
        }
        for name, values in fields.items():
            values.append(shifted.get(name, getattr(part, name)))
        vectors += len(part.vectors)
        groups += int(part.group.max()) + 1
    return Encoded(**{name: torch.cat(values) for name, values in fields.items()})

"""What learns the team's value while a run goes on: estimators vdn and qmix.

Invariant: a step's credit is made with the weights that the steps before left, and its weight against the plain return
with their explained variance, so that no baseline knows the return that it is taken from. Only then does the step's
fit begin. All that the next step reads is in the checkpoint.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recipe.dag.credit.mixer import Encoder, Target
from recipe.dag.credit.mixer_credit import explained_variance, mixer_weight
from recipe.dag.credit.mixer_data import Encoded, joined, returns_of
from recipe.dag.credit.mixer_fit import fit
from recipe.dag.credit.team_value import TeamValue, team_values
from recipe.dag.credit.team_value_credit import among_siblings, credit
from recipe.dag.episode.record import Episode
from recipe.dag.episode.row import Row
from recipe.dag.errors import UserError
from recipe.dag.train.said import encoded, layout_of, move_of
from recipe.dag.workflow.moves import moves_of
from recipe.dag.workflow.schema import Workflow

FILE = "mixer.pt"
SMOOTHING = 0.2
"""How much of the running explained variance is the newest step's."""
ROUNDING = 1e-9
"""By which a sum of rewards may miss 0 or 1."""
LEAST = -1.0
"""What an explained variance counts for at least: a bad start must not outlast what is learned after it."""


class Credit(NamedTuple):
    """What one call counts for."""

    plain: float
    """Of the team's return from its turn on: the share that is yet to be compared with its siblings'."""
    mixed: float
    """The share that the mixer gave it, which has its baseline already."""


Credits = dict[tuple[str, int], list[Credit]]
"""(uid, episode) -> what each of its calls is credited with."""


class Mixing:
    """Utilities, mixer, optimizer, replay and the running explained variance."""

    def __init__(self, workflow: Workflow, encoder: Encoder, *, seed: int, lock: asyncio.Lock | None = None):
        """`lock`: of the devices that the encoder shares; None where it shares none."""
        self.kind, self.spec = workflow.algorithm.estimator, workflow.algorithm.team_value
        self.encoder, self.seed, self.lock = encoder, seed, lock
        self.moves = moves_of(workflow.nodes, workflow.loops, workflow.episode.max_turns)
        self.layout = layout_of(workflow, self.moves)
        self.model: TeamValue | None = None
        self.target: Target | None = None
        self.replay: list[Encoded] = []
        self.explained = 0.0
        """Running mean of the steps so far, of what differs among siblings."""
        self.metrics: dict[str, float] = {}

    def learn(self, episodes: Sequence[Episode], *, seed: int) -> Credits:
        """What the calls of a step's episodes are credited with, then the fit to what they earned."""
        # What an unscored call earned is unknown, and with it what the team did.
        episodes = [e for e in episodes if e.calls and not any(call.unscored for call in e.calls)]
        if not episodes:
            return {}
        data = encoded(episodes, self.moves, self.encoder)
        first = self.model is None
        if first:
            self._build(data.vectors.shape[1])
            self.model.standardise(data)
        returns = returns_of(data, gamma_turn=self.spec.gamma_turn)
        if self.spec.loss == "binary":
            _check_binary(episodes, returns)
        values, utilities = team_values(self.model, data)
        weight = mixer_weight(self.explained, full=self.spec.full_at)
        plain = (1.0 - weight) * returns.gather(1, torch.tensor(self.layout.turns).expand(len(returns), -1))
        mixed = torch.zeros_like(plain)
        if weight > 0.0:
            mixed = weight * credit(self.model, data, returns, form=self.spec.form, utilities=utilities)
        held_out = explained_variance(among_siblings(values, data), among_siblings(returns, data))
        self.explained += SMOOTHING * (max(held_out, LEAST) - self.explained)
        if first:  # not before: this step's values must not know its returns
            self.model.standardise_returns(data, returns)
        loss = self._fit(data, seed)
        self.metrics = {"mixer/explained_variance": held_out, "mixer/weight": weight, "mixer/loss": loss}
        columns = {move: column for column, move in enumerate(self.moves)}
        shares = torch.stack([plain, mixed], dim=-1).tolist()
        return {
            (episode.uid, episode.index): [Credit(*shares[row][columns[move_of(call)]]) for call in episode.calls]
            for row, episode in enumerate(episodes)
        }

    def _build(self, dimension: int) -> None:
        spec = self.spec
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.model = TeamValue(
                self.layout,
                dimension,
                mixer=self.kind,
                binary=spec.loss == "binary",
                **spec.widths,
            )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=spec.lr, weight_decay=spec.weight_decay, fused=True
        )

    def _fit(self, data: Encoded, seed: int) -> float:
        spec = self.spec
        if self.target is None and spec.lam < 1.0:
            self.target = Target(self.model)
        try:
            loss = fit(
                self.model,
                self.optimizer,
                joined([*self.replay, data]),
                epochs=spec.epochs,
                batch_size=spec.batch_size,
                steps=spec.steps_per_epoch,
                seed=seed,
                gamma_turn=spec.gamma_turn,
                lam=spec.lam,
                target=self.target,
                tau=spec.target_tau,
            )
        except ValueError as error:
            raise UserError(f"algorithm.mixer: {error}; lower algorithm.mixer.lr, or scale the rewards") from error
        self.replay = [*self.replay, data][-spec.replay_steps :] if spec.replay_steps else []
        return loss

    def save(self, folder: Path) -> None:
        """Into `folder`/mixer.pt. Before the first step that had anything to learn from, there is nothing but zeros."""
        state: dict[str, Any] = {"made": self._made(), "explained": self.explained, "replay": []}
        if self.model is not None:
            state["dimension"] = self.model.question_mean.shape[0]
            state["model"], state["optimizer"] = self.model.state_dict(), self.optimizer.state_dict()
            state["target"] = self.target.module.state_dict() if self.target is not None else None
            state["replay"] = [{f.name: getattr(e, f.name) for f in dataclasses.fields(e)} for e in self.replay]
        torch.save(state, folder / FILE)

    def load(self, folder: Path) -> None:
        """Raises UserError where the checkpoint holds no mixer, or one that was made otherwise."""
        if not (folder / FILE).is_file():
            raise UserError(
                f"{folder}: no {FILE} in it, so {self.kind} cannot go on from here; set trainer.resume_mode=disable to "
                "start anew"
            )
        state = torch.load(folder / FILE, weights_only=True)
        for key, value in self._made().items():
            if state["made"].get(key) != value:
                raise UserError(
                    f"{folder / FILE}: made with {key}={state['made'].get(key)!r}, this run has {value!r}; use the "
                    "same, or set trainer.resume_mode=disable"
                )
        self.explained = state["explained"]
        self.replay = [Encoded(**fields) for fields in state["replay"]]
        if "model" not in state:
            return
        self._build(state["dimension"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:  # what this run's file says
            group["lr"], group["weight_decay"] = self.spec.lr, self.spec.weight_decay
        if state["target"] is not None:
            self.target = Target(self.model)
            self.target.module.load_state_dict(state["target"])

    def _made(self) -> dict[str, Any]:
        """What the saved weights fit to."""
        spec = self.spec
        calls = [move.id for move in self.moves]
        return {"estimator": self.kind, "loss": spec.loss, "calls": calls, **spec.widths}


def _check_binary(episodes: Sequence[Episode], returns: torch.Tensor) -> None:
    """Raises UserError for a return that is no probability."""
    outside = ((returns < -ROUNDING) | (returns > 1.0 + ROUNDING)).nonzero()
    if len(outside):
        row, turn = outside[0].tolist()
        raise UserError(
            f"algorithm.mixer.loss: binary needs returns from 0 to 1, but the team of sample {episodes[row].uid}, "
            f"episode {episodes[row].index}, earned {returns[row, turn].item():g} from turn {turn} on; set "
            "loss: squared, or scale the rewards"
        )


def credited(row: Row, credits: Sequence[Credit]) -> tuple[Row, list[float]]:
    """(the row with the plain share in place of its calls' rewards, their mixed share); `credits`: of all calls of its
    episode."""
    mine = [credits[position] for position in row.call_positions]
    plain = tuple(credit.plain for credit in mine)
    return dataclasses.replace(row, call_rewards=plain, reward=math.fsum(plain)), [credit.mixed for credit in mine]

"""Online learner of the joint value for vdn and qmix.

Invariant: a step's advantages come from the weights that the previous steps left, and the mixer's share of them from
the explained variance measured before the step, so no baseline knows the return that it is subtracted from. Only then
are the weights fitted to the step. Everything that the next step reads is in the checkpoint.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipe.dag.core.errors import UserError
from recipe.dag.credit.joint_advantages import center_among_siblings, explained_variance, joint_advantages, mixer_weight
from recipe.dag.credit.joint_value import JointValueNet, joint_values
from recipe.dag.credit.mixer import Target
from recipe.dag.credit.mixer_batch import MixerBatch, concatenate, team_returns
from recipe.dag.credit.mixer_fit import fit
from recipe.dag.policy.safe_load import weights_only
from recipe.dag.train.mixer_inputs import Encoder, call_layout, encode_episodes, move_of
from recipe.dag.types.record import Episode
from recipe.dag.types.row import Row
from recipe.dag.workflow.moves import moves_of
from recipe.dag.workflow.schema import Workflow

FILE = "mixer.pt"
SMOOTHING = 0.2
"""Weight of the newest step in the running explained variance."""
ROUNDING = 1e-9
"""Tolerance for sums of rewards outside [0, 1]."""
LEAST = -1.0
"""Explained variances are clamped here, so that one bad early step does not dominate the running mean."""


class Credit(NamedTuple):
    """The two shares of one call's credit."""

    plain: float
    """Share of the team's return from the call's turn on; it is still to be centered by group."""
    mixed: float
    """Share of the mixer's advantage, whose baseline is subtracted already."""


Credits = dict[tuple[str, int], list[Credit]]
"""(uid, episode) -> the credit of each of its calls."""


class TeamCritic:
    """Joint value, optimizer, replayed steps and the running explained variance."""

    def __init__(self, workflow: Workflow, encoder: Encoder, *, seed: int, lock: asyncio.Lock | None = None):
        """`lock`: that of the devices on which the encoder runs; None if it shares none with a policy."""
        spec = workflow.algorithm.team_value
        assert spec is not None, "only vdn and qmix have a team critic"
        self.estimator, self.spec = workflow.algorithm.estimator, spec
        self.encoder, self.seed, self.lock = encoder, seed, lock
        self.moves = moves_of(workflow.nodes, workflow.loops, workflow.episode.max_turns)
        self.layout = call_layout(workflow, self.moves)
        self.model: JointValueNet | None = None
        """None before the first episodes, which set the number of features."""
        self.target: Target[JointValueNet] | None = None
        self.replay: list[MixerBatch] = []
        self.explained = 0.0
        """Running mean over steps of the variance among siblings that the joint value explained."""
        self.metrics: dict[str, float] = {}

    def learn(self, episodes: Sequence[Episode], *, seed: int) -> Credits:
        """Return the credit of the calls of a step's episodes, then fit the joint value to the episodes' returns."""
        # the return of an unscored call is unknown, and so is that of its team
        episodes = [e for e in episodes if e.calls and not any(call.unscored for call in e.calls)]
        if not episodes:
            return {}
        batch = encode_episodes(episodes, self.moves, self.encoder)
        model, is_first = self.model, self.model is None
        if model is None:
            model = self._build(batch.vectors.shape[1])
            model.fit_text_scale(batch)
        returns_ET = team_returns(batch, gamma_turn=self.spec.gamma_turn)
        if self.spec.loss == "binary":
            _check_binary(episodes, returns_ET)
        values_ET, utilities_ETA = joint_values(model, batch)
        weight = mixer_weight(self.explained, gate_at_explained_variance=self.spec.full_at)
        call_credits = self._credits(model, episodes, batch, returns_ET, utilities_ETA, weight)
        held_out = explained_variance(center_among_siblings(values_ET, batch), center_among_siblings(returns_ET, batch))
        self.explained += SMOOTHING * (max(held_out, LEAST) - self.explained)
        if is_first:  # only now: this step's values must not know its returns
            model.fit_return_scale(batch, returns_ET)
        loss = self._fit(model, batch, seed)
        self.metrics = {"mixer/explained_variance": held_out, "mixer/weight": weight, "mixer/loss": loss}
        return call_credits

    def _credits(
        self,
        model: JointValueNet,
        episodes: Sequence[Episode],
        batch: MixerBatch,
        returns_ET: Tensor,
        utilities_ETA: Tensor,
        weight: float,
    ) -> Credits:
        turns_EA = torch.tensor(self.layout.turns).expand(len(returns_ET), -1)
        plain_EA = (1.0 - weight) * returns_ET.gather(1, turns_EA)
        mixed_EA = torch.zeros_like(plain_EA)
        if weight > 0.0:
            mixed_EA = weight * joint_advantages(model, batch, returns_ET, utilities_ETA, form=self.spec.form)
        columns = {move: column for column, move in enumerate(self.moves)}
        shares = torch.stack([plain_EA, mixed_EA], dim=-1).tolist()
        return {
            (episode.uid, episode.index): [Credit(*shares[row][columns[move_of(call)]]) for call in episode.calls]
            for row, episode in enumerate(episodes)
        }

    def _build(self, dimension: int) -> JointValueNet:
        spec = self.spec
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.model = JointValueNet(
                self.layout, dimension, mixer=self.estimator, binary=spec.loss == "binary", **spec.widths
            )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=spec.lr, weight_decay=spec.weight_decay, fused=True
        )
        return self.model

    def _fit(self, model: JointValueNet, batch: MixerBatch, seed: int) -> float:
        spec = self.spec
        if self.target is None and spec.lam < 1.0:
            self.target = Target(model)
        try:
            loss = fit(
                model,
                self.optimizer,
                concatenate([*self.replay, batch]),
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
        self.replay = [*self.replay, batch][-spec.replay_steps :] if spec.replay_steps else []
        return loss

    def save(self, folder: Path) -> None:
        """Write `folder`/mixer.pt. Before the first step with episodes, it holds no weights."""
        state: dict[str, Any] = {"made": self._fingerprint(), "explained": self.explained, "replay": []}
        if self.model is not None:
            state["dimension"] = self.model.question_mean.shape[0]
            state["model"], state["optimizer"] = self.model.state_dict(), self.optimizer.state_dict()
            state["target"] = self.target.module.state_dict() if self.target is not None else None
            fields = [field.name for field in dataclasses.fields(MixerBatch)]
            state["replay"] = [{name: getattr(batch, name) for name in fields} for batch in self.replay]
        torch.save(state, folder / FILE)

    def load(self, folder: Path) -> None:
        """Read `folder`/mixer.pt. Raises UserError if it is missing or was written with other options."""
        if not (folder / FILE).is_file():
            raise UserError(
                f"{folder}: {FILE} is missing, so {self.estimator} cannot resume here; set trainer.resume_mode=disable "
                "to start anew"
            )
        with weights_only(folder / FILE):
            state = torch.load(folder / FILE)
        for key, value in self._fingerprint().items():
            if state["made"].get(key) != value:
                raise UserError(
                    f"{folder / FILE}: written with {key}={state['made'].get(key)!r}, but this run has {value!r}; use "
                    "the same, or set trainer.resume_mode=disable"
                )
        self.explained = state["explained"]
        self.replay = [MixerBatch(**fields) for fields in state["replay"]]
        if "model" not in state:
            return
        model = self._build(state["dimension"])
        model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:  # the options of this run's workflow, not the checkpoint's
            group["lr"], group["weight_decay"] = self.spec.lr, self.spec.weight_decay
        if state["target"] is not None:
            self.target = Target(model)
            self.target.module.load_state_dict(state["target"])

    def _fingerprint(self) -> dict[str, Any]:
        """Return the options that the saved weights depend on."""
        calls = [move.id for move in self.moves]
        return {"estimator": self.estimator, "loss": self.spec.loss, "calls": calls, **self.spec.widths}


def _check_binary(episodes: Sequence[Episode], returns_ET: Tensor) -> None:
    """Raise UserError for a return outside [0, 1]."""
    outside = ((returns_ET < -ROUNDING) | (returns_ET > 1.0 + ROUNDING)).nonzero()
    if len(outside):
        row, turn = outside[0].tolist()
        raise UserError(
            f"algorithm.mixer.loss: binary needs returns from 0 to 1, but the team of sample {episodes[row].uid}, "
            f"episode {episodes[row].index}, earned {returns_ET[row, turn].item():g} from turn {turn} on; set "
            "loss: squared, or scale the rewards"
        )


def credited(row: Row, episode_credits: Sequence[Credit]) -> tuple[Row, list[float]]:
    """Return (the row with the plain share in place of its calls' rewards, the mixed share of each call).
    `episode_credits`: those of all calls of the row's episode."""
    own = [episode_credits[call.position] for call in row.calls]
    calls = tuple(dataclasses.replace(call, reward=credit.plain) for call, credit in zip(row.calls, own, strict=True))
    return dataclasses.replace(row, calls=calls), [credit.mixed for credit in own]

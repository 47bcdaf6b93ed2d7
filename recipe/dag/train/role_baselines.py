"""The moving averages that `reinforce` subtracts from returns (SPIRAL, arXiv 2506.24119).

Invariant: a baseline is a function of earlier steps alone, whatever the order of this step's rows, and is in every
checkpoint. SPIRAL itself moves its average once per trajectory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import fsum
from statistics import fmean
from typing import Any

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.types.row import Row

Averages = dict[str, float]
"""Role -> baseline."""


class RoleBaselines:
    """The average of what trajectories earned, by policy and role."""

    def __init__(self, decay: float, *, per_call: bool):
        """`per_call`: each call is a trajectory by itself."""
        self._decay, self._per_call = decay, per_call
        self.state: dict[str, Averages] = {}
        """By policy. A role without a baseline has 0."""

    @classmethod
    def for_algorithm(cls, algorithm: Algorithm) -> RoleBaselines | None:
        """Return the baselines that the estimator needs; None if it needs none."""
        decay = algorithm.decay_of_baseline
        return None if decay is None else cls(decay, per_call=not algorithm.carries_back)

    def take(self, policy: str, rows: Sequence[Row]) -> Averages:
        """Return the baselines of the policy's roles for these rows, then move them towards what the rows earned. A
        trajectory with an unscored call has no known return."""
        averages = self.state.setdefault(policy, {})
        before = {call.role: averages.get(call.role, 0.0) for row in rows for call in row.calls}
        for role, values in self._returns(rows).items():
            averages[role] = self._decay * averages.get(role, 0.0) + (1.0 - self._decay) * fmean(values)
        return before

    def _returns(self, rows: Sequence[Row]) -> Mapping[str, list[float]]:
        earned: defaultdict[tuple[Any, ...], list[float | None]] = defaultdict(list)
        for row in rows:
            for call in row.calls if not row.is_dropped else ():
                key = (call.role, row.uid, row.episode, call.agent, call.position if self._per_call else None)
                earned[key].append(None if call.unscored else call.reward)
        returns: defaultdict[str, list[float]] = defaultdict(list)
        for (role, *_), rewards in earned.items():
            if None not in rewards:  # fsum: the same in any order
                returns[role].append(fsum(reward for reward in rewards if reward is not None))
        return returns

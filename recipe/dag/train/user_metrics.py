"""Metrics of users that question the policies while a run trains: `validation.metrics`.

Invariant: the function is asked between steps, when the servers have the step's weights. Its state is in every
checkpoint, so that a resumed run goes on as if it had not stopped.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from recipe.dag.core.errors import UserError, described
from recipe.dag.core.location import raised_at
from recipe.dag.types.convention import METRICS
from recipe.dag.types.scorer import Scorer
from recipe.dag.types.values import as_number


class UserMetrics:
    """A user's function, if the configuration names one, and its state."""

    def __init__(self, config: DictConfig, base: str):
        """`base`: the workflow file. Raises UserError for a function that cannot be loaded."""
        self.ref, self.frequency = config.validation.metrics, int(config.validation.metrics_freq)
        self._function = METRICS.load(self.ref, base, "validation.metrics") if self.ref is not None else None
        if self._function is not None and not inspect.iscoroutinefunction(self._function):
            raise UserError(
                f"validation.metrics: {self.ref} must be `async def`, because a policy's answers are awaited"
            )
        self.state: dict[str, Any] = {}

    def due(self, step: int, total: int) -> bool:
        return self._function is not None and (step % self.frequency == 0 or step == total)

    async def measure(self, policies: Mapping[str, Scorer]) -> dict[str, float]:
        """Return the metrics, each as `user/<name>`. Raises UserError for an error of the function, and for results and
        states that are not numbers and JSON."""
        assert self._function is not None  # `due` is False without one
        try:
            result = await self._function(dict(policies), self.state)
            json.dumps(self.state, allow_nan=False)
        except UserError:
            raise
        except Exception as error:
            line = f" ({where})" if (where := raised_at(error)) else ""
            raise UserError(f"validation.metrics: {self.ref}: {type(error).__name__}: {error}{line}") from error
        if not isinstance(result, dict):
            raise UserError(f"validation.metrics: {self.ref} returned {described(result)}, not a dict of numbers")
        metrics: dict[str, float] = {}
        for name, value in result.items():
            if (number := as_number(value)) is None:
                raise UserError(f"validation.metrics: {self.ref}: {name} is {described(value)}, not a finite number")
            metrics[f"user/{name}"] = number
        return metrics

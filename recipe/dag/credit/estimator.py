"""The table of estimators, and how a workflow's `algorithm` reaches them.

Invariant: an estimator is a pure function of one policy's rows; the table below is all there is.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.group import group_relative
from recipe.dag.credit.reinforce import reinforce_pp
from recipe.dag.errors import UserError

if TYPE_CHECKING:
    from recipe.dag.episode.row import Row


class Estimator(Protocol):
    def __call__(self, batch: CreditBatch, **config: Any) -> tuple[list[Tensor], list[Tensor]]:
        """(advantages, returns): per row one float32 tensor as long as its response, 0 where the mask is 0. Its
        keyword-only parameters bear the names of the `algorithm` keys that they are filled from."""


ESTIMATORS: dict[str, Estimator] = {"grpo": group_relative, "reinforce_pp": reinforce_pp}


def estimate(name: str, rows: Sequence[Row], algorithm: Any) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns) of one policy's rows, in their order. `algorithm` is a workflow's, or anything with its
    fields; those that it lacks keep the estimator's defaults. Raises UserError for an unknown name, ValueError for bad
    rows."""
    if name not in ESTIMATORS:
        raise UserError(f"algorithm.estimator: {name!r} is unknown; choose one of {', '.join(ESTIMATORS)}")
    estimator = ESTIMATORS[name]
    options = [p.name for p in inspect.signature(estimator).parameters.values() if p.kind is p.KEYWORD_ONLY]
    config = {option: getattr(algorithm, option) for option in options if hasattr(algorithm, option)}
    return estimator(CreditBatch.from_rows(rows), **config)

"""From rows to advantages, by a workflow's `algorithm`.

Invariant: credit is a pure function of one policy's rows, or of all policies' where the algorithm spans them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from recipe.dag.credit.batch import CreditBatch

if TYPE_CHECKING:
    from recipe.dag.algorithms.base import Algorithm
    from recipe.dag.episode.row import Row


def estimate(
    algorithm: Algorithm,
    rows: Sequence[Row],
    *,
    values: Sequence[Tensor | None] | None = None,
    penalties: Sequence[Tensor | None] | None = None,
    credits: Sequence[Sequence[float]] | None = None,
    base: str = "",
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return (advantages, returns) of one policy's rows, or of all policies', in their order: one float32 tensor per
    row, as long as its response, 0 where the mask is 0.

    `values` and `penalties` (what is added to each token's reward): per row a tensor as long as its response, or None.
    `credits`: per row, what a mixer credits its calls with beside their rewards. `base`: the workflow file, for an
    estimator of the user's own. Raises ValueError for bad rows and for values that are needed and missing, UserError
    for what the user's own estimator does wrong.
    """
    if algorithm.needs_values and values is None:
        raise ValueError(f"estimator {algorithm.estimator} needs a critic's values")
    batch = CreditBatch.from_rows(
        rows,
        values=values,
        penalties=penalties,
        credits=credits,
        # a team's value is divided among each policy's calls by themselves
        one_policy=not algorithm.spans_policies or algorithm.team_value is not None,
        prompts="prompt_hash" in algorithm.grouping,
    )
    return algorithm.credit(batch, base)

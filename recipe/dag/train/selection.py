"""Which rows a step learns from.

Invariant: pure, and in the order of the rows. Where the algorithm leaves out what carries no gradient, a chained
estimator loses whole groups of episodes and never a link out of a chain.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.group import zero_variance
from recipe.dag.episode.row import Row
from recipe.dag.workflow.schema import Algorithm, Workflow

logger = logging.getLogger(__name__)

IDLE_STEPS = 3
"""So many steps in a row without a trained row are warned of, and again after every further such number."""


def select_rows(rows: Sequence[Row], workflow: Workflow) -> tuple[dict[str, list[Row]], list[Row]]:
    """Return (the rows that each trained policy learns from, the other rows of their episodes, whose rewards credit may
    have to know: of frozen policies, without a sampled token, or left out because their group earned one and the
    same)."""
    algorithm = workflow.algorithm
    split = split_by_policy(rows, workflow)
    if algorithm.drop_zero_variance:
        split = {name: keep_informative(policy_rows, algorithm) for name, policy_rows in split.items()}
    chosen = {name: [row for row in policy_rows if 1 in row.response_mask] for name, policy_rows in split.items()}
    learned = {id(row) for policy_rows in chosen.values() for row in policy_rows}
    return chosen, [row for row in rows if id(row) not in learned]


def split_by_policy(rows: Sequence[Row], workflow: Workflow) -> dict[str, list[Row]]:
    """Rows of each trained policy, in order; frozen policies' rows are not trained on."""
    split: dict[str, list[Row]] = {name: [] for name in workflow.trained_policies()}
    for row in rows:
        if row.policy in split:
            split[row.policy].append(row)
    return split


def keep_informative(rows: list[Row], algorithm: Algorithm) -> list[Row]:
    """Without the rows whose group has one reward only, where the algorithm says so."""
    if not algorithm.drop_zero_variance or not rows:
        return rows
    batch = CreditBatch.from_rows(rows, prompts="prompt_hash" in algorithm.grouping)
    options = {key: getattr(algorithm, key) for key in ("group_by", "stat_unit", "gamma_turn")}
    flat = [zero_variance(batch, rewards=column, **options) for column in algorithm.reward_columns(batch)]
    return [row for index, row in enumerate(rows) if not all(one[index] for one in flat)]


def informative_uids(rows: Sequence[Row], workflow: Workflow) -> list[str]:
    """Groups of episodes in which at least one trained policy has rewards to compare, in the order of the rows."""
    split = split_by_policy(rows, workflow).values()
    found = {row.uid for mine in split for row in keep_informative(mine, workflow.algorithm)}
    return [uid for uid in dict.fromkeys(row.uid for row in rows) if uid in found]


class IdleSteps:
    """Warns where several steps in a row train nothing."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._drops = algorithm.drop_zero_variance
        self._count = 0

    def count(self, step: int, *, trained: int, rows: int) -> None:
        """`rows`: of the step's episodes; `trained`: those that were learned from."""
        self._count = 0 if trained else self._count + 1
        if not self._count or self._count % IDLE_STEPS:
            return
        why = "no call of a trained policy sampled a token that may be trained"
        if rows and self._drops:
            why = (
                "in every group all rewards are equal, and algorithm.drop_zero_variance leaves such groups out; the "
                "problems are all too easy or all too hard, or the reward does not tell answers apart"
            )
        logger.warning("steps %d to %d trained nothing: %s", step - self._count + 1, step, why)

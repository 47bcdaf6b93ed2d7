"""Selection of what a step learns from: its rows, and with dynamic sampling (DAPO, arXiv 2503.14476) as many batches of
samples as it takes to fill it.

Invariant: the rows are a function of the episodes, in their order, and the samples one of the sampler's position after
the previous step and of the episodes' rewards; the order in which episodes finish does not matter. If the algorithm
drops rows without gradient, a chained estimator loses whole groups of episodes, never a single link of a chain.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.algorithms.estimate import credit_batch, score_advantages
from recipe.dag.credit.group import mean_outside, zero_variance
from recipe.dag.episode.failure import most_frequent
from recipe.dag.episode.rows import left_out_unscored
from recipe.dag.types.record import Episode
from recipe.dag.types.row import Row
from recipe.dag.workflow.schema import Workflow

logger = logging.getLogger(__name__)

IDLE_STEPS = 3
"""A warning is logged after this many consecutive steps without a trained row, and again after as many more."""


def select_rows(rows: Sequence[Row], workflow: Workflow) -> tuple[dict[str, list[Row]], list[Row]]:
    """Return (the rows that each trained policy learns from, the remaining rows).

    The remaining rows belong to frozen policies, have no sampled token, or were dropped because all rewards of their
    group are equal; of a row that merges such calls with others, they are a row without tokens. Credit may still need
    their rewards."""
    trained = {
        name: [row for row in keep_informative(policy_rows, workflow.algorithm) if 1 in row.response_mask]
        for name, policy_rows in split_by_policy(rows, workflow).items()
    }
    trained_ids = {id(call) for policy_rows in trained.values() for row in policy_rows for call in row.calls}
    remaining: list[Row] = []
    for row in rows:
        calls = tuple(call for call in row.calls if id(call) not in trained_ids)
        if calls:
            remaining.append(row if len(calls) == len(row.calls) else replace(row, calls=calls).without_tokens())
    return trained, remaining


def split_by_policy(rows: Sequence[Row], workflow: Workflow) -> dict[str, list[Row]]:
    """Return the rows of each trained policy, in order, without those of frozen policies."""
    split: dict[str, list[Row]] = {name: [] for name in workflow.trained_policies()}
    for row in rows:
        if row.policy in split:
            split[row.policy].append(row)
    return split


def keep_informative(rows: list[Row], algorithm: Algorithm) -> list[Row]:
    """Return the rows, with `drop_zero_variance` without the calls that carry no gradient: those without a pair, or
    their group has equal rewards only and, for candidates, their score is not compared with a different one."""
    if not algorithm.drop_zero_variance or not rows:
        return rows
    if algorithm.pairs_calls:
        paired = iter(algorithm.paired_calls(credit_batch(algorithm, rows)))
        in_pairs = [[next(paired) for _ in row.calls] for row in rows]
        return [row.only(calls) for row, calls in zip(rows, in_pairs, strict=True) if any(calls)]
    kept = [row for row in rows if not row.is_dropped]
    differs = iter(_differ(kept, algorithm) if kept else ())
    informative = [
        [bool(score) | (not row.is_dropped and next(differs)) for score in scores]
        for row, scores in zip(rows, score_advantages(algorithm, rows), strict=True)
    ]
    return [row.only(calls) for row, calls in zip(rows, informative, strict=True) if any(calls)]


def _differ(rows: list[Row], algorithm: Algorithm) -> list[bool]:
    """Return for each call of the rows, one after another, whether the returns of its group differ and are within
    `mean_return_between` on average."""
    batch = credit_batch(algorithm, rows)
    options = {key: getattr(algorithm, key) for key in ("group_by", "stat_unit", "gamma_turn")}
    # one column per reward component, each [C]; a call is left out only if no component of its group varies
    constant = [zero_variance(batch, rewards=column, **options) for column in algorithm.reward_columns(batch)]
    outside = [False] * len(batch.uid)
    if algorithm.mean_return_between is not None:
        outside = mean_outside(batch, algorithm.mean_return_between, **options)
    return [not (all(columns) or beyond) for *columns, beyond in zip(*constant, outside, strict=True)]


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """The episodes of one step, and the rows to learn from."""

    episodes: list[Episode]
    """All episodes that were run, including those that the step does not learn from."""
    rows: list[Row]
    batches: int
    """Batches of samples that were rolled out."""
    metrics: dict[str, float]


async def collect(
    roll_out: Callable[[int], Awaitable[list[Episode]]],
    rows_of: Callable[[list[Episode]], list[Row]],
    workflow: Workflow,
    *,
    groups: int,
) -> StepRollouts:
    """Roll out one batch, or with dynamic sampling as many as it takes to get `groups` informative groups.

    `roll_out(k)` runs the step's k-th batch, counted from 0. If `max_batches` batches have fewer informative groups,
    the step uses those."""
    dynamic = workflow.algorithm.dynamic_sampling
    if dynamic is None:
        episodes = await roll_out(0)
        return StepRollouts(episodes, rows_of(episodes), 1, {})
    episodes, rows, informative, batches = [], [], [], 0
    while len(informative) < groups and batches < dynamic.max_batches:
        new_episodes = await roll_out(batches)
        new_rows = rows_of(new_episodes)
        batches += 1
        episodes += new_episodes
        rows += new_rows
        informative += informative_uids(new_rows, workflow)
    used = set(informative[:groups])
    metrics = {"dynamic_sampling/batches": float(batches), "dynamic_sampling/groups": float(len(used))}
    return StepRollouts(episodes, [row for row in rows if row.uid in used], batches, metrics)


def informative_uids(rows: Sequence[Row], workflow: Workflow) -> list[str]:
    """Return the groups of episodes in which at least one trained policy has rewards to compare, in row order."""
    informative = {
        row.uid
        for policy_rows in split_by_policy(rows, workflow).values()
        for row in keep_informative(policy_rows, workflow.algorithm)
    }
    return [uid for uid in dict.fromkeys(row.uid for row in rows) if uid in informative]


class IdleSteps:
    """Logs a warning if several consecutive steps train nothing."""

    def __init__(self, workflow: Workflow) -> None:
        self._workflow = workflow
        self._count = 0

    def count(self, step: int, *, trained: int, rows: Sequence[Row], episodes: Sequence[Episode]) -> None:
        """Count a step that learned from `trained` of its rows."""
        self._count = 0 if trained else self._count + 1
        if self._count and self._count % IDLE_STEPS == 0:
            why = _idle_reason(rows, episodes, self._workflow)
            logger.warning("steps %d to %d trained nothing: %s", step - self._count + 1, step, why)


def _idle_reason(rows: Sequence[Row], episodes: Sequence[Episode], workflow: Workflow) -> str:
    """Return why a step without a trained row has none."""
    good = [episode for episode in episodes if episode.fault is None]
    if episodes and not good:
        return f"a fault ended every episode, most often: {most_frequent(e.fault for e in episodes if e.fault)}"
    calls = [call for episode in good for call in episode.calls]
    trained, scope = workflow.trained_policies(), workflow.algorithm.unscored_scope
    own = sum(call.policy in trained and 1 in call.response_mask for call in calls)
    left_out = sum(len(left_out_unscored(episode, scope, trained)) for episode in good)
    if own and left_out == own:
        failed = Counter(str(call.parsed["failed"]) for call in calls if "failed" in call.parsed)
        reason = f"; failed calls: {failed.most_common(1)[0][0]}" if failed else ""
        return f"every call is left out, since a reward function returned no score for it or a later one{reason}"
    any_rows = any(split_by_policy(rows, workflow).values())
    if workflow.algorithm.pairs_calls and any_rows:
        return "no two answers to one prompt earned different rewards, so none form a pair"
    if workflow.algorithm.drop_zero_variance and any_rows:
        return (
            "in every group all rewards are equal, and algorithm.drop_zero_variance drops such groups; the "
            "problems are all too easy or all too hard, or the reward does not distinguish answers"
        )
    return "no call of a trained policy sampled a token that may be trained"

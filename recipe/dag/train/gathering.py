"""How many batches of samples a step rolls out (dynamic sampling; DAPO, arXiv 2503.14476).

Invariant: which samples a step uses is a function of where the step before left the sampler and of what the episodes
earned. Groups count in the order of the samples, so it does not matter which episode ended first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from recipe.dag.episode.record import Episode
from recipe.dag.episode.row import Row
from recipe.dag.train.selection import informative_uids
from recipe.dag.workflow.schema import Workflow


@dataclass(frozen=True, slots=True)
class Gathered:
    episodes: list[Episode]
    """All that were run."""
    rows: list[Row]
    """Of those that the step learns from."""
    batches: int
    metrics: dict[str, float]


async def gather(
    roll_out: Callable[[int], Awaitable[list[Episode]]],
    rows_of: Callable[[list[Episode]], list[Row]],
    workflow: Workflow,
    *,
    groups: int,
) -> Gathered:
    """One batch, or as many as it takes to find `groups` informative groups; `roll_out(k)` runs the step's k-th batch,
    counted from 0. What was found is used even where `max_batches` did not suffice."""
    dynamic = workflow.algorithm.dynamic_sampling
    if dynamic is None:
        episodes = await roll_out(0)
        return Gathered(episodes, rows_of(episodes), 1, {})
    episodes, rows, found, batches = [], [], [], 0
    while len(found) < groups and batches < dynamic.max_batches:
        new = await roll_out(batches)
        batches += 1
        episodes += new
        rows += (new_rows := rows_of(new))
        found += informative_uids(new_rows, workflow)
    used = set(found[:groups])
    metrics = {"dynamic_sampling/batches": float(batches), "dynamic_sampling/groups": float(len(used))}
    return Gathered(episodes, [row for row in rows if row.uid in used], batches, metrics)

"""The table of estimators, and how a workflow's `algorithm` reaches them.

Invariant: an estimator is a pure function of one policy's rows, or of all policies' (`SPANNING`); the table below is
all there is.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from recipe.dag.algorithms import ENTRIES, MIXED, SPANNING, WITH_VALUES, contradictions
from recipe.dag.credit.batch import CreditBatch
from recipe.dag.credit.chain import gae, gae_chain
from recipe.dag.credit.critic import ippo, mappo
from recipe.dag.credit.gdpo import gdpo
from recipe.dag.credit.group import group_relative
from recipe.dag.credit.mixer_credit import compared
from recipe.dag.credit.reinforce import reinforce, reinforce_pp, reinforce_pp_baseline
from recipe.dag.errors import UserError

if TYPE_CHECKING:
    from recipe.dag.episode.row import Row


class Estimator(Protocol):
    def __call__(self, batch: CreditBatch, **config: Any) -> tuple[list[Tensor], list[Tensor]]:
        """(advantages, returns): per row one float32 tensor as long as its response, 0 where the mask is 0. Its
        keyword-only parameters bear the names of the `algorithm` keys that they are filled from."""


ESTIMATORS: dict[str, Estimator] = {
    "grpo": group_relative,
    "rloo": group_relative,
    "magrpo": group_relative,
    "reinforce": reinforce,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gae": gae,
    "gae_chain": gae_chain,
    "gdpo": gdpo,
    "ippo": ippo,
    "mappo": mappo,
    "vdn": compared,
    "qmix": compared,
}


def estimate(
    name: str,
    rows: Sequence[Row],
    algorithm: Any,
    *,
    values: Sequence[Tensor | None] | None = None,
    penalties: Sequence[Tensor | None] | None = None,
    credits: Sequence[Sequence[float]] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns) of one policy's rows, or of all policies' (`SPANNING`), in their order. `algorithm` is a
    workflow's, or anything with its fields; those that it lacks are what the catalogue says, or else the estimator's
    defaults. `values` and `penalties` (what is added to each token's reward): per row a tensor as long as its response,
    or None. `credits`: per row, what a mixer credits its calls with beside their rewards. Raises UserError for an
    unknown name and for options that the name contradicts, ValueError for bad rows and for values that are needed and
    not there."""
    if name not in ESTIMATORS:
        raise UserError(f"algorithm.estimator: {name!r} is unknown; choose one of {', '.join(ESTIMATORS)}")
    if name in WITH_VALUES and values is None:
        raise ValueError(f"estimator {name} needs a critic's values")
    estimator = ESTIMATORS[name]
    options = [p.name for p in inspect.signature(estimator).parameters.values() if p.kind is p.KEYWORD_ONLY]
    given = {option: getattr(algorithm, option) for option in options if hasattr(algorithm, option)}
    for key, value in contradictions(name, given).items():
        raise UserError(f"algorithm.{key}: {name} has {value!r}, not {given[key]!r}; remove it, or choose grpo")
    config = {key: value for key, value in ENTRIES[name].options.items() if key in options} | given
    batch = CreditBatch.from_rows(
        rows,
        values=values,
        penalties=penalties,
        credits=credits,
        one_policy=name not in SPANNING - MIXED,
        prompts="prompt_hash" in config.get("group_by", ()),
    )
    return estimator(batch, **config)

"""Rows whose response the data gave, for estimators that compare samples with it (`opponent: data`).

Invariant: such a row answers a prompt that the policy answered in the step, token by token, in the same place of the
workflow, and ends as an answer of the policy does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from recipe.dag.algorithms.base import Algorithm
from recipe.dag.core.errors import UserError
from recipe.dag.endpoint.client import PolicyEndpoint
from recipe.dag.types.record import Episode
from recipe.dag.types.row import Row
from recipe.dag.types.values import look_up


def check_given(samples: Sequence[Mapping[str, Any]], algorithm: Algorithm, what: str) -> None:
    """Raise UserError if the algorithm compares with texts of the samples and one of them has none."""
    path = algorithm.given_text
    for number, sample in enumerate(samples if path is not None else (), 1):
        if not isinstance(text := look_up(sample, path or ""), str) or not text.strip():
            keys = [*sample, *(f"extra_info.{key}" for key in sample.get("extra_info", {}))]
            raise UserError(
                f"{what}: row {number} has no text at `{path}` (it has {', '.join(keys)}); write the path of the texts "
                "to imitate in `algorithm.gold`"
            )


def given_rows(
    rows: Sequence[Row], episodes: Sequence[Episode], algorithm: Algorithm, endpoint: PolicyEndpoint
) -> Iterator[Row]:
    """Yield a row for each prompt of the rows of one policy. A text that does not fit into the policy's limits is left
    out. `episodes`: those that the rows come from."""
    from recipe.dag.algorithms.estimate import credit_batch  # imports torch

    path, samples = algorithm.given_text, {episode.uid: episode.sample for episode in episodes}
    batch, tokenizer = credit_batch(algorithm, rows), endpoint.tokenizer
    places = ((row, call, start) for row in rows for call, (start, _) in zip(row.calls, row.spans(), strict=True))
    keys = zip(*(getattr(batch, key) for key in algorithm.grouping), strict=True)
    answered: set[tuple] = set()
    for key, (row, call, start) in zip(keys, places, strict=True):
        if key in answered or 1 not in row.response_mask[start : call.end]:
            continue
        answered.add(key)
        prompt = row.prompt_ids + row.response_ids[: row.response_mask.index(1, start)]
        text = look_up(samples[row.uid], path or "")
        response = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        if len(response) <= endpoint.room(len(prompt)):
            yield replace(
                row,
                episode=-1,
                prompt_ids=prompt,
                response_ids=response,
                response_mask=[1] * len(response),
                rollout_log_probs=[0.0] * len(response),
                calls=(replace(call, end=len(response), reward=0.0, parts={}, learns=True, unscored=False),),
                given=True,
            )

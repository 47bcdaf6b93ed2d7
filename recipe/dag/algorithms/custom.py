"""An estimator of the user's own, in a file of the user's own.

Invariant: it computes what calls are worth; how that reaches tokens and rows, and that it is finite and complete, is
the engine's concern. What is wrong with it is one line with the file and line of the user's code.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from recipe.dag.algorithms.base import Algorithm, Scope
from recipe.dag.errors import UserError, described
from recipe.dag.location import raised_at
from recipe.dag.workflow.user_code import load_object

if TYPE_CHECKING:
    from torch import Tensor

    from recipe.dag.credit.batch import CreditBatch


class Custom(Algorithm):
    """`estimator: file.py:function`, called as `function(batch, **estimator_kwargs)`; or `file.py:Class`, built with
    estimator_kwargs, whose `credit(batch)` is called. `batch` is a CreditBatch of one policy's rows. Either returns the
    advantage of each call, [C], or (advantages, returns), each [C] or a list of one tensor per row, as long as its
    response. With critics, `batch.values` holds what they say."""

    source: ClassVar[str] = "your own"
    assumes: ClassVar[str] = "what you wrote"
    may_read_values: ClassVar[bool] = True

    estimator: str = Field(pattern=".:.")
    estimator_kwargs: dict[str, Any] = {}

    @property
    def unscored_scope(self) -> Scope:
        return "trajectory"

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[list[Tensor], list[Tensor]]:
        found = load_object(self.estimator, base)
        try:
            if inspect.isclass(found):
                result = found(**self.estimator_kwargs).credit(batch)
            else:
                result = found(batch, **self.estimator_kwargs)
        except UserError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error} ({raised_at(error)})"
            raise UserError(f"algorithm.estimator: {self.estimator}: {text}") from error
        pair = result if isinstance(result, tuple) and len(result) == 2 else (result, batch.rewards)
        return self._per_row(batch, pair[0], "advantages"), self._per_row(batch, pair[1], "returns")

    def _per_row(self, batch: CreditBatch, values: Any, what: str) -> list[Tensor]:
        """`values`: [C] numbers of calls, or one tensor per row."""
        import torch

        if isinstance(values, list) and values and isinstance(values[0], torch.Tensor) and values[0].dim() == 1:
            if [len(row) for row in values] != list(batch.row_lengths):
                self._refuse(batch, values, what)
            tokens = torch.cat([row.to(torch.float32) for row in values]) * batch.mask
        else:
            tokens = batch.spread(self._per_call(batch, values, what))
        if not torch.isfinite(tokens).all():
            raise UserError(f"algorithm.estimator: {self.estimator} returned {what} that are not finite")
        return batch.per_row(tokens)

    def _per_call(self, batch: CreditBatch, values: Any, what: str) -> Tensor:
        import torch

        numbers = values
        if isinstance(values, Sequence) and not isinstance(values, str):
            try:
                numbers = torch.tensor(values, dtype=torch.float32)
            except (TypeError, ValueError):
                self._refuse(batch, values, what)
        if not isinstance(numbers, torch.Tensor) or numbers.shape != batch.rewards.shape:
            self._refuse(batch, values, what)
        return numbers.detach().to(torch.float32)

    def _refuse(self, batch: CreditBatch, values: Any, what: str) -> None:
        raise UserError(
            f"algorithm.estimator: {self.estimator} must return {what} as one number for each of the "
            f"{len(batch.uid)} calls, or one tensor for each of the {len(batch.row_lengths)} rows, not "
            f"{described(values)}"
        )

"""An estimator of the user's own, in a file of the user's own.

Invariant: it computes what calls are worth; how that reaches tokens and rows, and that it is finite and complete, is
the engine's concern. What is wrong with it is one line with the file and line of the user's code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from numbers import Number
from typing import TYPE_CHECKING, Any, ClassVar

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

    estimator: str
    estimator_kwargs: dict[str, Any] = {}

    @property
    def unscored_scope(self) -> Scope:
        return "trajectory"

    def load(self, base: str) -> Callable[[CreditBatch], Any]:
        """Return what computes the credit of a batch. Raises UserError for code that cannot be imported or called."""
        found = load_object(self.estimator, base)
        try:
            if inspect.isclass(found):
                return found(**self.estimator_kwargs).credit
        except UserError:
            raise
        except Exception as error:
            raise self._failed(error) from error
        if not callable(found) or inspect.iscoroutinefunction(found):
            raise UserError(f"algorithm.estimator: {self.estimator} must be a function, not async, or a class")
        return partial(found, **self.estimator_kwargs)

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[list[Tensor], list[Tensor]]:
        function = self.load(base)
        try:
            result = function(batch)
        except UserError:
            raise
        except Exception as error:
            raise self._failed(error) from error
        pair = (result, batch.rewards)
        if isinstance(result, tuple) and len(result) == 2 and not any(isinstance(one, Number) for one in result):
            pair = result
        return self._per_row(batch, pair[0], "advantages"), self._per_row(batch, pair[1], "returns")

    def _failed(self, error: Exception) -> UserError:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return UserError(f"algorithm.estimator: {self.estimator}: {text} ({raised_at(error)})")

    def _per_row(self, batch: CreditBatch, values: Any, what: str) -> list[Tensor]:
        """`values`: [C] numbers of calls, or a list of one tensor per row."""
        import torch

        try:
            if isinstance(values, list) and values and all(getattr(row, "ndim", 0) == 1 for row in values):
                rows = [torch.as_tensor(row).detach().to("cpu", torch.float32) for row in values]
                if [len(row) for row in rows] != list(batch.row_lengths):
                    raise ValueError
                tokens = torch.cat(rows) * batch.mask
            else:
                calls = torch.as_tensor(values).detach().to("cpu", torch.float32)
                if calls.shape != batch.rewards.shape:
                    raise ValueError
                tokens = batch.spread(calls)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise UserError(
                f"algorithm.estimator: {self.estimator} must return {what} as one number for each of the "
                f"{len(batch.uid)} calls, or a list of one tensor for each of the {len(batch.row_lengths)} rows, not "
                f"{' '.join(described(values).split())}"
            ) from error
        if not torch.isfinite(tokens).all():
            raise UserError(f"algorithm.estimator: {self.estimator} returned {what} that are not finite")
        return batch.per_row(tokens)

"""An estimator in a file of the user.

Invariant: the user's code computes credit per call or token; the engine spreads it over tokens and rows, and checks
that it is finite and complete. An error of the user's code is one line with its file and line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from numbers import Number
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from recipe.dag.algorithms.base import Algorithm, Scope
from recipe.dag.algorithms.facts import Facts
from recipe.dag.core.errors import UserError, described
from recipe.dag.core.frozen import Mark
from recipe.dag.core.location import raised_at
from recipe.dag.core.problem import Problem
from recipe.dag.core.user_code import load_object
from recipe.dag.types.convention import ESTIMATOR, Reference

if TYPE_CHECKING:
    from torch import Tensor

    from recipe.dag.credit.batch import CreditBatch


class Custom(Algorithm):
    """`estimator: file.py:function`, called as `function(batch, **estimator_kwargs)`; or `file.py:Class`, built with
    estimator_kwargs, whose `credit(batch)` is called. `batch` is a CreditBatch of one policy's rows. Either returns the
    advantage of each call, [C], or (advantages, returns), each [C] or a list of one tensor per row, as long as its
    response. With critics, `batch.values` holds their values."""

    source: ClassVar[str] = "your own"
    assumes: ClassVar[str] = "what you wrote"
    may_read_values: ClassVar[bool] = True

    estimator: Annotated[str, Mark.CODE]
    estimator_kwargs: dict[str, Any] = {}

    @property
    def unscored_scope(self) -> Scope:
        return "trajectory"

    def check_options(self, facts: Facts) -> Iterator[Problem]:
        yield from super().check_options(facts)
        at, options_at = (("algorithm", key) for key in ("estimator", "estimator_kwargs"))
        reference = Reference(self.estimator, at, self.estimator_kwargs, options_at)
        yield from facts.check_function(reference, ESTIMATOR, or_class={"credit": ESTIMATOR})

    def load(self, base: str) -> Callable[[CreditBatch], Any]:
        """Return the function that computes the credit of a batch. Raises UserError for code that cannot be imported or
        called."""
        loaded = load_object(self.estimator, base)
        try:
            if inspect.isclass(loaded):
                instance: Any = loaded(**self.estimator_kwargs)
                ESTIMATOR.check(instance.credit, f"algorithm.estimator: credit of {self.estimator}")
                return instance.credit
        except UserError:
            raise
        except Exception as error:
            raise self._failed(error) from error
        if not callable(loaded) or inspect.iscoroutinefunction(loaded):
            raise UserError(f"algorithm.estimator: {self.estimator} must be a function, not async, or a class")
        ESTIMATOR.check(loaded, f"algorithm.estimator: {self.estimator}", self.estimator_kwargs)
        return partial(loaded, **self.estimator_kwargs)

    def credit(self, batch: CreditBatch, base: str = "") -> tuple[list[Tensor], list[Tensor]]:
        function = self.load(base)
        try:
            result = function(batch)
        except UserError:
            raise
        except Exception as error:
            raise self._failed(error) from error
        # two numbers are the advantages of two calls, not (advantages, returns)
        is_pair = (
            isinstance(result, tuple) and len(result) == 2 and not any(isinstance(part, Number) for part in result)
        )
        advantages, returns = result if is_pair else (result, batch.rewards)
        return self._per_row(batch, advantages, "advantages"), self._per_row(batch, returns, "returns")

    def _failed(self, error: Exception) -> UserError:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return UserError(f"algorithm.estimator: {self.estimator}: {text} ({raised_at(error)})")

    def _per_row(self, batch: CreditBatch, values: Any, what: str) -> list[Tensor]:
        """Return `values`, [C] numbers of calls or a list of one tensor per row, as one tensor per row."""
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
                tokens = batch.per_token(calls)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise UserError(
                f"algorithm.estimator: {self.estimator} must return {what} as one number for each of the "
                f"{len(batch.uid)} calls, or a list of one tensor for each of the {len(batch.row_lengths)} rows, not "
                f"{' '.join(described(values).split())}"
            ) from error
        if not torch.isfinite(tokens).all():
            raise UserError(f"algorithm.estimator: {self.estimator} returned {what} that are not finite")
        return batch.per_row(tokens)

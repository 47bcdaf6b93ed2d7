"""Throughput of a policy's models: tokens per second, and utilization of its devices.

Invariant: computed on the driver from the rows' lengths and the wall time of the worker call, transfers included. A
metric that cannot be computed (on a CPU, or on a device that verl's table lacks) is absent, not 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig
from verl.utils.device import get_device_name
from verl.utils.flops_counter import ESTIMATE_FUNC, get_device_flops

from recipe.dag.policy.adapter import AdapterPolicy
from recipe.dag.policy.policy import PolicyRuntime
from recipe.dag.types.row import Row
from recipe.dag.workflow.model_size import UnknownSize, size_of

FORWARD_SHARE = 1 / 3
"""Share of a forward pass in the FLOPs of a forward and a backward pass; recomputed activations count in neither."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One worker call over a policy's rows."""

    kind: str
    """log_prob, reference, values, update or critic_update."""
    lengths: tuple[int, ...]
    """Tokens of each row, prompt and response together; a row occurs once per epoch."""
    seconds: float
    sampled: int = 0
    """Tokens of all rows that the policy sampled, which alone are projected onto the vocabulary."""

    @property
    def tokens_per_s(self) -> float:
        return sum(self.lengths) / max(self.seconds, 1e-9)


@contextmanager
def measured(passes: list[Pass], kind: str, rows: Iterable[Row], *, epochs: int = 1) -> Iterator[None]:
    """Append to `passes` the pass over `rows` that the body makes."""
    rows = list(rows)
    lengths = tuple(len(row.prompt_ids) + len(row.response_ids) for row in rows) * epochs
    sampled = sum(sum(row.response_mask) for row in rows) * epochs
    started = time.monotonic()
    yield
    passes.append(Pass(kind, lengths, time.monotonic() - started, sampled))


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """The FLOPs of a policy's model, and the peak of its devices."""

    config: Any
    """transformers' configuration of the model."""
    parameters: int | None
    """Used for model families without a formula in verl; None if unknown."""
    peak: float
    """Peak FLOP/s of all devices of the policy's trainer together."""
    adapter: bool = False
    """The model is frozen, and an adapter on it is trained, whose own FLOPs, about a hundredth, are not counted."""

    def of_update(self, lengths: Sequence[int]) -> float | None:
        """Return the FLOPs of a forward and a backward pass over sequences of these lengths by verl's formula, which
        counts input and output embeddings for every token; None where unknown."""
        formula = ESTIMATE_FUNC.get(self.config.model_type)
        if formula is not None:
            return formula(self.config, sum(lengths), list(lengths), 1.0) * 1e12
        return None if self.parameters is None else 6.0 * self.parameters * sum(lengths)

    def needed(self, done: Pass) -> float | None:
        """Return the FLOPs that an update like `done` needs: looking up input embeddings takes none, and output
        embeddings are multiplied for sampled tokens only. An update of an adapter needs no gradients of the weights of
        linear layers. None where unknown."""
        flops, config = self.of_update(done.lengths), self.config.get_text_config()
        if flops is None:
            return None
        formula = ESTIMATE_FUNC.get(self.config.model_type)
        tied = formula is None and config.tie_word_embeddings
        counted = (1 if tied else 2) * sum(done.lengths)  # verl's formulas count both, tied or not
        left_out = 6.0 * config.vocab_size * config.hidden_size * (counted - done.sampled)
        if not (self.adapter and done.kind == "update"):
            return flops - left_out
        # without sequences, the formulas count no attention
        linear = flops if formula is None else formula(self.config, sum(done.lengths), [], 1.0) * 1e12
        return flops - left_out - (linear - left_out) / 3

    def utilization(self, done: Pass, flops: float | None) -> float | None:
        """Return the share of the devices' peak that the pass used, in [0, 1], if its update takes `flops`."""
        if flops is None:
            return None
        return flops * (1.0 if done.kind == "update" else FORWARD_SHARE) / max(done.seconds, 1e-9) / self.peak


def find_flops(policy: PolicyRuntime) -> ModelFlops | None:
    """Return the FLOPs of the policy's model and devices; None on a CPU, and on devices that verl's table lacks."""
    if get_device_name() == "cpu":
        return None
    peak = policy.workers.execute_func_rank_zero(get_device_flops, "B")  # "B": without a unit prefix, in FLOP/s
    if not math.isfinite(peak):
        return None
    model = policy.config.actor_rollout_ref.model
    try:
        parameters = size_of(model.path).parameters
    except UnknownSize:
        parameters = None
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    return ModelFlops(config, parameters, peak * policy.workers.world_size, adapter=isinstance(policy, AdapterPolicy))


def throughput_metrics(passes: Sequence[Pass], flops: ModelFlops | None) -> dict[str, float]:
    """Return `<kind>_tokens_per_s` of each kind of pass, and of the update and the log-probs the utilization: `mfu` and
    `log_prob_mfu` by the FLOPs that are needed, and with the suffix `_verl` by verl's formula."""
    metrics: dict[str, float] = {}
    for kind in dict.fromkeys(done.kind for done in passes):
        same_kind = [done for done in passes if done.kind == kind]
        lengths = tuple(length for done in same_kind for length in done.lengths)
        sampled = sum(done.sampled for done in same_kind)
        total = Pass(kind, lengths, sum(done.seconds for done in same_kind), sampled)
        metrics[f"{kind}_tokens_per_s"] = total.tokens_per_s
        if flops is not None and kind in ("update", "log_prob"):
            name = "mfu" if kind == "update" else f"{kind}_mfu"
            for suffix, done in (("", flops.needed(total)), ("_verl", flops.of_update(total.lengths))):
                if (share := flops.utilization(total, done)) is not None:
                    metrics[f"{name}{suffix}"] = share
    return metrics


def memory_metrics(reported: dict[str, float]) -> dict[str, float]:
    """Return the memory metrics of an update, in GiB, without the zeros of devices that do not measure memory."""
    return {name.removeprefix("perf/"): value for name, value in reported.items() if value > 0}

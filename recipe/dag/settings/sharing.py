"""Which policies should share GPUs, by what a run has measured.

Invariant: pure. A step is predicted as its rollout and its updates one after the other, each as long as on the pool of
GPUs that takes longest. Servers scale with the GPUs of their pool; a trainer that is sharded over twice as many keeps
`KEPT` of its speed for each. Whether a placement fits into memory is not looked at: `plan` shows that of any.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.workflow.schema import Workflow

KEPT = 0.925
"""Measured with Qwen2.5-3B's shape on two H100 (recipe/retool_ma/README.md): 1.85 times the tokens."""
LEAST_GAIN = 0.03
"""By what share of a step a placement has to be faster than sharing all GPUs, which needs no balance."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a policy, or a model with its adapters, did in a step of a run, on average."""

    sampled: float
    trained: float
    computed: float
    """Tokens of its rows, prompts included."""
    seconds: float
    """In which its training nodes ran."""
    gpus: int
    """On which it was."""
    rollout: float
    """Its share of the rollout by sampled tokens, in seconds of one GPU."""

    @property
    def training(self) -> float:
        """Seconds in which one GPU would train it."""
        return self.seconds * _speed(self.gpus)


@dataclass(frozen=True, slots=True)
class Placement:
    own: Mapping[str, int]
    """Policy -> GPUs of its own; the others share what is left."""
    seconds: float
    """Predicted for a step."""


def loads_of(
    workflow: Workflow, metrics: Sequence[Mapping[str, Any]], gpus: int, own: Mapping[str, int]
) -> dict[str, Load]:
    """Return the load of each policy that has GPUs, from the `metrics` of the steps of a run on `gpus` GPUs, `own` of
    them the policies' own. The first of several steps, in which kernels compile, is left out. Raises UserError if the
    run had other policies, or no step."""
    steps = [step for step in metrics if step.get("timing/train") is not None]
    steps = steps[1:] or steps
    if not steps:
        raise UserError("no step of training is in its metrics.jsonl")

    def mean(key: str) -> float:
        return fmean(step.get(key) or 0.0 for step in steps)

    sampled = dict.fromkeys(workflow.local_policies(), 0.0)
    for agent in workflow.agents:
        if (base := workflow.base_of(agent.policy)) in sampled:
            prefix = f"agent/{agent.name}"
            sampled[base] += fmean(
                (step.get(f"{prefix}/calls") or 0) * (step.get(f"{prefix}/response_length/mean") or 0) for step in steps
            )
    rollout = mean("timing/rollout") * gpus / max(sum(sampled.values()), 1.0)
    loads = {}
    for base in sampled:
        names = workflow.trained_on(base)
        if missing := [name for name in names if f"policy/{name}/total_tokens" not in steps[-1]]:
            raise UserError(f"it trained no policy `{missing[0]}`; name a run of this workflow")
        nodes = [node.id for node in workflow.training_nodes if node.policy in names]
        loads[base] = Load(
            sampled=sampled[base],
            trained=sum(mean(f"policy/{name}/trained_tokens") for name in names),
            computed=sum(mean(f"policy/{name}/total_tokens") for name in names),
            seconds=sum(mean(f"timing/{node}") for node in nodes),
            gpus=own.get(base, gpus - sum(own.values())),
            rollout=rollout * sampled[base],
        )
    return loads


def propose(loads: Mapping[str, Load], gpus: int) -> list[Placement]:
    """Return the placement to choose, and then the best of the other kind: all policies share `gpus` GPUs, or some have
    their own. If nothing can be apart, there is one."""
    together = Placement({}, _step_seconds(loads, {}, gpus))
    apart = [Placement(own, _step_seconds(loads, own, gpus)) for own in _placements(tuple(loads), gpus) if own]
    best = min(apart, key=lambda placement: (placement.seconds, len(placement.own)), default=together)
    if best is together:
        return [together]
    return [best, together] if best.seconds < together.seconds * (1 - LEAST_GAIN) else [together, best]


def describe(loads: Mapping[str, Load], placements: Sequence[Placement], gpus: int) -> Iterator[str]:
    """Yield lines that report loads and the placement to choose, with the settings for it."""
    for name, load in loads.items():
        counts = f"{load.sampled:,.0f} tokens sampled, {load.trained:,.0f} trained, {load.computed:,.0f} computed"
        yield (f"  {name}: {counts}; {load.seconds:.1f} s of training on {load.gpus} GPU{'s' * (load.gpus > 1)}")
    first, *others = (f"{_words(loads, each, gpus)}: about {each.seconds:.1f} s a step" for each in placements)
    yield f"  proposed: {'; '.join([first, *others])}"
    if own := placements[0].own:
        yield f"  settings: {' '.join(f'workflow.policies.{name}.gpus={count}' for name, count in own.items())}"


def _words(loads: Mapping[str, Load], placement: Placement, gpus: int) -> str:
    shared, left = [name for name in loads if name not in placement.own], gpus - sum(placement.own.values())
    parts = [f"{name} alone on {count}" for name, count in placement.own.items()]
    if shared:
        parts.append(f"{' and '.join(shared)} {'together ' if len(shared) > 1 else ''}on {left}")
    return ", ".join(parts)


def _step_seconds(loads: Mapping[str, Load], own: Mapping[str, int], gpus: int) -> float:
    pools = [([name], count) for name, count in own.items()]
    if shared := [name for name in loads if name not in own]:
        pools.append((shared, gpus - sum(own.values())))
    rollout = max(sum(loads[name].rollout for name in names) / count for names, count in pools)
    return rollout + max(sum(loads[name].training for name in names) / _speed(count) for names, count in pools)


def _placements(names: Sequence[str], gpus: int) -> Iterator[dict[str, int]]:
    """Yield the GPUs of those with their own, for each way to use all `gpus`."""
    for own in _counts(names, gpus):
        left = gpus - sum(own.values())
        if (left > 0) if len(own) < len(names) else (left == 0):
            yield own


def _counts(names: Sequence[str], left: int) -> Iterator[dict[str, int]]:
    if not names:
        yield {}
        return
    for count in range(left + 1):
        for others in _counts(names[1:], left - count):
            yield ({names[0]: count} if count else {}) | others


def _speed(gpus: int) -> float:
    """Return how many times as fast as one a trainer's GPUs are."""
    return gpus * KEPT ** math.log2(gpus)

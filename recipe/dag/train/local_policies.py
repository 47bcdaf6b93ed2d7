"""Starts the policies whose weights the run loads, and the learner of the team's value.

Invariant: importing this module imports verl, Ray and torch, so only a run that has such policies does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial

from omegaconf import DictConfig

from recipe.dag.core.tasks import together
from recipe.dag.policy.adapter import AdapterHost, AdapterPolicy
from recipe.dag.policy.adapter_config import host_config, trained_adapters
from recipe.dag.policy.config import policy_config
from recipe.dag.policy.encoder import start_encoder
from recipe.dag.policy.placement import Pool, create
from recipe.dag.policy.policy import PolicyRuntime
from recipe.dag.policy.snapshot import SnapshotPolicy
from recipe.dag.report.phases import announce
from recipe.dag.settings.pools import PoolSpec, plan_pools
from recipe.dag.train.alternation import actor_updates
from recipe.dag.train.models import ModelPaths
from recipe.dag.train.team_critic import TeamCritic
from recipe.dag.workflow.adapter_shape import shape_of
from recipe.dag.workflow.schema import Workflow


async def start_policies(
    run: DictConfig, workflow: Workflow, models: ModelPaths, policies: dict[str, PolicyRuntime], *, platform: str
) -> None:
    """Launch the policies: those of a pool one after the other, because a server sizes its memory by what is free when
    it starts, and the pools side by side. The processes that train a pool's later policies start beside the first.

    All are in `policies` before one is launched, so that the caller can stop what has started if one fails; finally
    they are in the workflow's order.
    """

    async def start(pool: Pool, spec: PoolSpec) -> None:
        trainers = [name for name in spec.policies if workflow.trained_on(name)]
        trained = len(trainers) + sum(name in models.critics for name in trainers)
        made: list[PolicyRuntime] = []
        for base in spec.policies:
            make = partial(
                policy_config,
                run,
                workflow,
                model_path=models.policies[base],
                processes=sum(spec.groups(platform)),
                sharing=len(spec.policies),
                offload_between_turns=len(spec.policies) > 1 and trained > 1,
                platform=platform,
            )
            configs = {
                name: make(
                    name,
                    critic_path=models.critics.get(name),
                    updates=actor_updates(workflow, name, run.trainer.total_training_steps),
                )
                for name in (base, *workflow.adapters_of(base))
            }
            made += _on_one_model(workflow, configs, pool, models, policies, platform=platform)
        policies.update({policy.name: policy for policy in made})
        await together([_each(made, lambda policy: policy.start()), _each(made, lambda policy: policy.launch())])

    specs = plan_pools(workflow, nnodes=run.trainer.nnodes, n_gpus_per_node=run.trainer.n_gpus_per_node)
    pools = [await asyncio.to_thread(create, spec, platform=platform) for spec in specs]
    await together(map(start, pools, specs))
    for name in workflow.policies:
        if name in policies:
            policies[name] = policies.pop(name)


async def _each(policies: Sequence[PolicyRuntime], step: Callable[[PolicyRuntime], Awaitable[None]]) -> None:
    for policy in policies:
        await step(policy)


def _on_one_model(
    workflow: Workflow,
    configs: dict[str, DictConfig],
    pool: Pool,
    models: ModelPaths,
    policies: Mapping[str, PolicyRuntime],
    *,
    platform: str,
) -> Iterator[PolicyRuntime]:
    """Yield the policy that has the model, then its adapters. `configs`: of each of them, in this order. `policies`:
    all of the run, once they have started."""
    base, *adapters = configs
    critic = base in models.critics
    if not adapters:
        spec = workflow.policies[base]
        if spec.snapshot_of is not None:
            yield SnapshotPolicy(base, configs[base], pool, policies, source=spec.snapshot_of, every=spec.every or 1)
            return
        trained = not spec.frozen
        reference = spec.reference if trained else None
        yield PolicyRuntime(base, configs[base], pool, trained=trained, reference=reference, critic=critic)
        return
    shapes = {name: shape_of(lora) for name in adapters if (lora := workflow.policies[name].lora) is not None}
    trained_here = [
        adapter
        for name in workflow.trained_on(base)
        for adapter in trained_adapters(
            name, workflow.policies[name], shapes[name], configs[name], models.adapters.get(name)
        )
    ]
    config = host_config(configs, base, trained_here, shapes, platform=platform)
    host = AdapterHost(base, config, pool, trained_here)
    yield host
    for name in adapters:
        spec = workflow.policies[name]
        yield AdapterPolicy(
            name,
            configs[name],
            host,
            trained=not spec.frozen,
            reference=spec.reference,
            critic=name in models.critics,
            start=models.adapters.get(name),
        )


def open_mixing(
    run: DictConfig, workflow: Workflow, models: ModelPaths, policies: dict[str, PolicyRuntime], *, platform: str
) -> TeamCritic | None:
    """Return the learner of the team's value, whose encoder runs on the devices of the first trained policy; None for
    estimators without one."""
    if models.encoder is None:
        return None
    team_value = workflow.algorithm.team_value
    assert team_value is not None  # find_models finds an encoder only for a team value

    announce("loading the mixer's text encoder")
    encoder, first = team_value.encoder, workflow.trained_policies()[0]
    model = encoder.model or workflow.policies[first].model
    reader = start_encoder(
        policies[first].pool,
        models.encoder,
        platform=platform,
        chunk=encoder.chunk,
        tokenizer=model.tokenizer_path,
        trust=model.trust_remote_code,
    )
    return TeamCritic(workflow, reader, seed=run.seed, lock=None if platform == "cpu" else policies[first].pool.lock)

"""Starts the policies whose weights the run loads, and the learner of the team's value.

Invariant: importing this module imports verl, Ray and torch, so only a run that has such policies does.
"""

from __future__ import annotations

import asyncio

from omegaconf import DictConfig

from recipe.dag.core.tasks import together
from recipe.dag.policy.config import policy_config
from recipe.dag.policy.encoder import start_encoder
from recipe.dag.policy.placement import Pool, create
from recipe.dag.policy.policy import PolicyRuntime
from recipe.dag.report.phases import announce
from recipe.dag.settings.pools import PoolSpec, plan_pools
from recipe.dag.train.alternation import actor_updates
from recipe.dag.train.models import ModelPaths
from recipe.dag.train.team_critic import TeamCritic
from recipe.dag.workflow.schema import Workflow


async def start_policies(
    run: DictConfig, workflow: Workflow, models: ModelPaths, policies: dict[str, PolicyRuntime], *, platform: str
) -> None:
    """Launch the policies: those of a pool one after the other, because a server sizes its memory by what is free when
    it starts, and the pools side by side.

    Each policy is added to `policies` before it is launched, so that the caller can stop what has started if one
    fails; finally they are in the workflow's order.
    """

    async def start(pool: Pool, spec: PoolSpec) -> None:
        actors = [name for name in spec.policies if not workflow.policies[name].frozen]
        trained = len(actors) + sum(name in models.critics for name in actors)
        for name in spec.policies:
            config = policy_config(
                run,
                workflow,
                name,
                model_path=models.policies[name],
                critic_path=models.critics.get(name),
                processes=sum(spec.groups(platform)),
                sharing=len(spec.policies),
                offload_between_turns=len(spec.policies) > 1 and trained > 1,
                updates=actor_updates(workflow, name, run.trainer.total_training_steps),
                platform=platform,
            )
            policies[name] = PolicyRuntime(
                name,
                config,
                pool,
                trained=name in actors,
                reference=name in actors and workflow.policies[name].reference,
                critic=name in models.critics,
            )
            await policies[name].start()

    specs = plan_pools(workflow, nnodes=run.trainer.nnodes, n_gpus_per_node=run.trainer.n_gpus_per_node)
    pools = [await asyncio.to_thread(create, spec, platform=platform) for spec in specs]
    await together(map(start, pools, specs))
    for name in workflow.local_policies():
        policies[name] = policies.pop(name)


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

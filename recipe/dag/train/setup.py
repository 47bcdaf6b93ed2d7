"""Starts the policies, tools and processes of a run.

Invariant: every possible user error is checked before the first process starts and before anything is written. verl,
Ray and torch are imported by the functions that need them, since a run whose policies are all APIs needs none.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from recipe.dag.core.errors import UserError
from recipe.dag.episode.client import PolicyEndpoint
from recipe.dag.episode.listed_tools import check_tools
from recipe.dag.episode.make_tools import (
    built_in_tools,
    limited_tools,
    make_tools,
    tool_specs,
    user_tools,
    uses_sandbox,
)
from recipe.dag.episode.remote.connect import Endpoint, Remotes
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.episode.tool_limits import most_processes
from recipe.dag.report.api_usage import NAME, Totals, write_api_usage
from recipe.dag.report.phases import announce
from recipe.dag.settings.pools import plan_pools
from recipe.dag.tools.builtin import BUILTIN
from recipe.dag.tools.sandbox import Sandbox
from recipe.dag.train.alternation import actor_updates
from recipe.dag.train.tool_columns import check_columns
from recipe.dag.types.tool import Tool, close_tool, tool_name
from recipe.dag.workflow.schema import Workflow

if TYPE_CHECKING:
    from recipe.dag.policy.policy import PolicyRuntime
    from recipe.dag.tools.sandbox_client import SandboxClient
    from recipe.dag.train.models import ModelPaths
    from recipe.dag.train.rollout_processes import RolloutProcesses, SpreadRunner
    from recipe.dag.train.team_critic import TeamCritic

logger = logging.getLogger(__name__)
SAVE_SPENT_S = 2.0
"""Seconds between two writes of what the API policies have consumed: what a killed run can forget."""


async def start_policies(
    run: DictConfig, workflow: Workflow, models: ModelPaths, policies: dict[str, PolicyRuntime], *, platform: str
) -> None:
    """Launch the policies one after the other, because a server sizes its memory by what is free when it starts.

    Each policy is added to `policies` before it is launched, so that the caller can stop what has started if one
    fails; finally they are in the workflow's order.
    """
    from recipe.dag.policy.config import policy_config
    from recipe.dag.policy.placement import create
    from recipe.dag.policy.policy import PolicyRuntime

    for spec in plan_pools(workflow, nnodes=run.trainer.nnodes, n_gpus_per_node=run.trainer.n_gpus_per_node):
        pool = await asyncio.to_thread(create, spec, platform=platform)
        actors = [name for name in spec.policies if not workflow.policies[name].frozen]
        trained = len(actors) + sum(name in models.critics for name in actors)
        for name in spec.policies:
            config = policy_config(
                run,
                workflow,
                name,
                model_path=models.policies[name],
                critic_path=models.critics.get(name),
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
    from recipe.dag.policy.encoder import start_encoder
    from recipe.dag.train.team_critic import TeamCritic

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


async def _open_sandbox(run: DictConfig) -> Sandbox:
    """Use the server at `sandbox.url`, or start one. Raises UserError."""
    config = run.sandbox
    if config.url:
        limits = {"max_concurrent": config.max_concurrent, "margin_s": config.margin_s}
        return await Sandbox.connect(config.url, token=config.token, **limits)
    announce("starting the sandbox")
    isolation = {"isolation": config.isolation, "accept_unsandboxed": config.accept_unsandboxed}
    sandbox = await Sandbox.start(config.max_concurrent, **isolation)
    assert sandbox.local is not None  # it was just started
    announce(f"the sandbox isolates programs: {sandbox.local.isolation}")
    return sandbox


def interpreter_defaults(run: DictConfig) -> dict[str, float]:
    return {"timeout_s": run.sandbox.timeout_s, "memory_mb": run.sandbox.memory_mb}


def _endpoints(policies: Mapping[str, PolicyRuntime]) -> dict[str, PolicyEndpoint]:
    endpoints = {}
    for name, policy in policies.items():
        assert policy.endpoint is not None  # start_policies has started it
        endpoints[name] = policy.endpoint
    return endpoints


@dataclass(slots=True)
class Resources:
    """The resources of a run's episodes besides its policies: the tools that agents declare, the sandbox that tools and
    envs use, the API policies with what they have consumed, and the processes that run large batches."""

    tools: dict[str, Tool] = field(default_factory=dict)
    sandbox: Sandbox | None = None
    processes: RolloutProcesses | None = None
    remotes: Remotes | None = None
    """The API policies."""
    folder: str = ""
    """The run's output folder."""
    _saving: asyncio.Task[None] | None = None
    """Writes what the API policies have consumed while they consume it."""
    _save_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """An older count must not replace a newer one."""

    @classmethod
    async def open(
        cls,
        run: DictConfig,
        workflow: Workflow,
        samples: Sequence[Mapping[str, Any]] = (),
        *,
        spent: Totals | None = None,
    ) -> Resources:
        """Make the tools, and start the local sandbox if one is needed and no URL is configured. `spent`: what the API
        policies of a resumed run have consumed.

        Raises UserError for a tool that cannot work, for a sample whose tools_kwargs no tool accepts, and if a
        configured sandbox or the server of a tool or an API policy does not answer."""
        remotes = Remotes(workflow, spent)
        resources = cls(remotes=remotes, folder=run.output_dir)
        tools = user_tools(workflow)
        built_in = {key: spec for key, spec in tool_specs(workflow).items() if spec.path is None}
        by_name = {tool_name(tool, key): tool for key, tool in tools.items()}
        by_name |= {BUILTIN[str(spec)].shown_as(spec.kwargs): BUILTIN[str(spec)] for spec in built_in.values()}
        check_columns(samples, workflow, by_name)
        if remotes.specs:
            announce("asking the servers of the API policies")
            await remotes.check()
        if uses_sandbox(workflow):
            resources.sandbox = await _open_sandbox(run)
        tools |= built_in_tools(workflow, resources._client, interpreter_defaults(run)) if built_in else {}
        resources.tools = limited_tools(workflow, tools)
        await check_tools(resources.tools)
        if remotes.specs:
            resources._saving = asyncio.create_task(resources._keep_spent(), name="save-api-usage")
        return resources

    async def start_processes(
        self, run: DictConfig, workflow: Workflow, policies: Mapping[str, PolicyRuntime], *, episodes: int
    ) -> None:
        """Start the processes that run batches of `episodes`, if the configuration asks for more than this one. Raises
        UserError if it asks for more than the limit of a tool or an API can be divided among."""
        from recipe.dag.train.rollout_processes import RolloutProcesses, choose_processes, cores

        count = choose_processes(run.rollout.processes, episodes, cores())
        most, option = most_processes(workflow) or (count, "")
        if count > most and run.rollout.processes != "auto":
            raise UserError(
                f"rollout.processes={run.rollout.processes}: {option}, fewer than one for each process; raise it, or "
                f"pass rollout.processes={most}"
            )
        count = min(count, most)
        if count == 1:
            return
        announce(f"starting {count} processes that run episodes")
        remote = self.remotes.shared() if self.remotes is not None else {}
        self.processes = await RolloutProcesses.start(
            count,
            {**{name: policy.spec() for name, policy in policies.items()}, **remote},
            self._all_endpoints(policies),
            make_tools=partial(make_tools, **interpreter_defaults(run)),
            sandbox=self.sandbox and self.sandbox.arguments,
            ensure=self.sandbox and self.sandbox.ensure,
            seed=run.seed,
        )

    def runner(
        self, run: DictConfig, workflow: Workflow, policies: Mapping[str, PolicyRuntime]
    ) -> EpisodeRunner | SpreadRunner:
        """Return the runner of the workflow's episodes. Raises UserError."""
        endpoints = self._all_endpoints(policies)
        runner = EpisodeRunner(workflow, endpoints, self.tools, seed=run.seed, sandbox=self._client)
        if self.processes is None:
            return runner
        from recipe.dag.train.rollout_processes import SpreadRunner

        return SpreadRunner(runner, workflow, self.processes, run.rollout.processes)

    @property
    def _client(self) -> SandboxClient | None:
        return self.sandbox and self.sandbox.client

    @property
    def max_programs(self) -> int | None:
        """How many programs the sandbox runs at once; None without one."""
        return self.sandbox.arguments["max_concurrent"] if self.sandbox is not None else None

    def metrics(self) -> dict[str, float]:
        """Return how often the local sandbox has been restarted, and what records do not hold of the API policies."""
        local = self.sandbox and self.sandbox.local
        restarts = {"sandbox/restarts": float(local.restarts)} if local is not None else {}
        return restarts | (self.remotes.metrics() if self.remotes is not None else {})

    def spent(self) -> Totals:
        """Return what the API policies have consumed since the run began."""
        return self.remotes.counts() if self.remotes is not None else {}

    def save_spent(self) -> None:
        """Write what the API policies have consumed into the output folder."""
        with self._save_lock:
            write_api_usage(self.folder, self.spent())

    async def _keep_spent(self) -> None:
        """Save what was spent every few seconds, since a run that is killed cannot do so at its end."""
        saved, failing = self.spent(), False
        while True:
            await asyncio.sleep(SAVE_SPENT_S)
            if (spent := self.spent()) == saved:
                continue
            try:
                await asyncio.to_thread(self.save_spent)
            except OSError as error:
                if not failing:
                    logger.warning("%s was not written, and is tried again: %s", NAME, error)
                failing = True
            else:
                saved, failing = spent, False

    async def _end_saving(self) -> None:
        if self._saving is None:
            return
        self._saving.cancel()
        (error,) = await asyncio.gather(self._saving, return_exceptions=True)
        if isinstance(error, Exception):
            logger.warning("%s was not written while the run went on: %s", NAME, error)
        self._saving = None

    async def close(self) -> None:
        await self._end_saving()
        try:
            if self.processes is not None:
                await self.processes.close()
        finally:  # tools and sandbox must be closed even if Ray has failed
            for tool in self.tools.values():
                await close_tool(tool)
            if self.remotes is not None:
                try:
                    self.save_spent()
                except OSError as error:  # it must not hide the error that ends the run
                    logger.warning("%s was not written: %s", NAME, error)
                await self.remotes.close()
            if self.sandbox is not None:
                await self.sandbox.close()

    def _all_endpoints(self, policies: Mapping[str, PolicyRuntime]) -> dict[str, Endpoint]:
        return {**_endpoints(policies), **(self.remotes.endpoints if self.remotes is not None else {})}

"""The resources of a run's episodes: its policies, tools, sandbox and rollout processes.

Invariant: every possible user error is checked before the first process starts and before anything is written. Each
part starts and ends itself; `close` ends those that have started, the last one first. verl, Ray and torch are imported
by the methods that need them, since a run whose policies are all APIs needs none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig

from recipe.dag.endpoint.client import Endpoint, GenerationClient, PolicyEndpoint
from recipe.dag.episode.listed_tools import check_tools
from recipe.dag.episode.make_tools import (
    built_in_tools,
    limited_tools,
    make_tools,
    tool_specs,
    user_tools,
    uses_sandbox,
)
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.episode.token_model import TokenModel, check_options
from recipe.dag.episode.toolset import Toolset
from recipe.dag.report.api_usage import Totals
from recipe.dag.report.phases import announce
from recipe.dag.tools.builtin import BUILTIN
from recipe.dag.tools.sandbox import Sandbox
from recipe.dag.train.alternation import all_bindings
from recipe.dag.train.api_policies import ApiPolicies
from recipe.dag.train.tool_columns import check_columns
from recipe.dag.types.tool import Tool, close_tool, tool_name
from recipe.dag.workflow.schema import Workflow

if TYPE_CHECKING:
    from recipe.dag.policy.policy import PolicyRuntime
    from recipe.dag.tools.sandbox_client import SandboxClient
    from recipe.dag.train.models import ModelPaths
    from recipe.dag.train.rollout_processes import RolloutProcesses, SpreadRunner
    from recipe.dag.train.team_critic import TeamCritic


async def open_sandbox(settings: DictConfig) -> Sandbox:
    """Use the server at `sandbox.url`, or begin to start one. `settings`: the configuration's block `sandbox`. Raises
    UserError if a configured server does not answer."""
    if settings.url:
        limits = {"max_concurrent": settings.max_concurrent, "margin_s": settings.margin_s}
        return await Sandbox.connect(settings.url, token=settings.token, **limits)
    isolation = {"isolation": settings.isolation, "accept_unsandboxed": settings.accept_unsandboxed}
    return Sandbox.begin(settings.max_concurrent, **isolation)


@dataclass(slots=True)
class Resources:
    """What has been started of the resources."""

    remotes: ApiPolicies
    sandbox: Sandbox | None = None
    """None if no tool and no env needs one."""
    tools: dict[str, Tool] = field(default_factory=dict)
    """By `ToolSpec.key`."""
    policies: dict[str, PolicyRuntime] = field(default_factory=dict)
    """Those whose weights the run loads, in the workflow's order."""
    mixing: TeamCritic | None = None
    """The learner of the team's value; None for estimators without one."""
    processes: RolloutProcesses | None = None
    """Those that run large batches; None if the run's own process runs all."""
    _ends: AsyncExitStack = field(default_factory=AsyncExitStack)

    @classmethod
    async def open(
        cls,
        run: DictConfig,
        workflow: Workflow,
        samples: Sequence[Mapping[str, Any]] = (),
        *,
        spent: Totals | None = None,
    ) -> Resources:
        """Start what needs no device: API policies, sandbox, tools. The sandbox starts beside what follows, until
        `ready`. `spent`: what the API policies of a resumed run have consumed.

        Raises UserError for a tool that cannot work, for a sample whose tools_kwargs no tool accepts, and if a
        configured sandbox or the server of a tool or an API policy does not answer."""
        async with AsyncExitStack() as ends:
            resources = cls(ApiPolicies(workflow, run.output_dir, spent))
            ends.push_async_callback(resources.remotes.close)
            tools = user_tools(workflow)
            built_in = [(BUILTIN[str(spec)], spec) for spec in tool_specs(workflow).values() if spec.path is None]
            by_name = {tool_name(tool, key): tool for key, tool in tools.items()}
            by_name |= {tool.shown_as(spec.kwargs): tool for tool, spec in built_in}
            check_columns(samples, workflow, by_name)
            await resources.remotes.start()
            if uses_sandbox(workflow):
                resources.sandbox = await open_sandbox(run.sandbox)
                ends.push_async_callback(resources.sandbox.close)
            if built_in:
                tools |= built_in_tools(workflow, resources.client, interpreter_defaults(run))
            resources.tools = limited_tools(workflow, tools)
            for tool in resources.tools.values():
                ends.push_async_callback(close_tool, tool)
            await check_tools(resources.tools)
            resources._ends = ends.pop_all()
        return resources

    async def ready(self) -> None:
        """Wait until the sandbox has started. Raises UserError if it does not."""
        if self.sandbox is not None and self.sandbox.local is not None:
            announce("starting the sandbox")
            await self.sandbox.ready()
            announce(f"the sandbox isolates programs: {self.sandbox.local.isolation}")

    def check_agents(self, workflow: Workflow, models: ModelPaths) -> None:
        """Check each agent, its tools included, with the chat template of every policy that it has during a run. Raises
        UserError."""
        from recipe.dag.policy.tokenizer import shared_tokenizer

        endpoints = {}
        for name, path in models.policies.items():
            model = workflow.policies[name].model
            tokenizer = shared_tokenizer(model.tokenizer_path or path, trust_remote_code=model.trust_remote_code)
            endpoints[name] = PolicyEndpoint(cast(GenerationClient, None), tokenizer, max_model_len=0)
        for bound in all_bindings(workflow):
            for node in bound.rollout_nodes:
                agent = bound.agent_of(node)
                if (endpoint := endpoints.get(agent.policy)) is not None:
                    check_options(agent, {name: endpoints[name].tokenizer for name in bound.policies_of(agent)})
                    TokenModel(agent, bound.episode, endpoint, Toolset(agent, self.tools), f"node {node.id}")

    async def start_policies(self, run: DictConfig, workflow: Workflow, models: ModelPaths, *, platform: str) -> None:
        """Start the policies whose weights the run loads, and the learner of the team's value."""
        from recipe.dag.train.local_policies import open_mixing, start_policies

        await start_policies(run, workflow, models, self.policies, platform=platform)
        self.mixing = await asyncio.to_thread(open_mixing, run, workflow, models, self.policies, platform=platform)

    async def start_processes(self, run: DictConfig, workflow: Workflow, *, episodes: int) -> None:
        """Start the processes that run batches of `episodes`, if the configuration asks for more than this one. Raises
        UserError if it asks for more than the limit of a tool or an API can be divided among."""
        from recipe.dag.train.rollout_processes import RolloutProcesses, count_processes
        from recipe.dag.train.rollout_worker import WorkerSpec

        if (count := count_processes(run, workflow, episodes)) == 1:
            return
        announce(f"starting {count} processes that run episodes")
        spec = WorkerSpec(
            {name: policy.spec() for name, policy in self.policies.items()} | self.remotes.shared(),
            partial(make_tools, **interpreter_defaults(run)),
            run.seed,
            sandbox=self.sandbox and self.sandbox.arguments,
        )
        ensure = self.sandbox and self.sandbox.ensure
        self.processes = await RolloutProcesses.start(count, spec, self.endpoints, ensure)
        self._ends.push_async_callback(self.processes.close)

    def runner(self, run: DictConfig, workflow: Workflow) -> EpisodeRunner | SpreadRunner:
        """Return the runner of the workflow's episodes. Raises UserError."""
        runner = EpisodeRunner(workflow, self.endpoints, self.tools, seed=run.seed, sandbox=self.client)
        if self.processes is None:
            return runner
        from recipe.dag.train.rollout_processes import SpreadRunner

        return SpreadRunner(runner, workflow, self.processes, run.rollout.processes)

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """Of all policies; those that the run loads must have been started."""
        endpoints: dict[str, Endpoint] = {}
        for name, policy in self.policies.items():
            assert policy.endpoint is not None  # start_policies has started it
            endpoints[name] = policy.endpoint
        return endpoints | dict(self.remotes.endpoints)

    @property
    def client(self) -> SandboxClient | None:
        return self.sandbox and self.sandbox.client

    def metrics(self) -> dict[str, float]:
        """Return how often the local sandbox has been restarted, and what records do not hold of the API policies."""
        local = self.sandbox and self.sandbox.local
        restarts = {"sandbox/restarts": float(local.restarts)} if local is not None else {}
        return restarts | self.remotes.metrics()

    async def close(self) -> None:
        """End what has started, the last one first, each even if another one fails; the policies end with Ray."""
        await self._ends.aclose()


def interpreter_defaults(run: DictConfig) -> dict[str, float]:
    return {"timeout_s": run.sandbox.timeout_s, "memory_mb": run.sandbox.memory_mb}

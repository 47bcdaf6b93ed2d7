"""From a configuration to running policies and tools.

Invariant: everything that the user may have got wrong is checked before the first process starts and before anything is
written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from omegaconf import DictConfig

from recipe.dag.episode.env_class import needs_sandbox
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.errors import UserError
from recipe.dag.location import raised_at
from recipe.dag.policy.config import policy_config
from recipe.dag.policy.encoder import start_encoder
from recipe.dag.policy.placement import create, plan_pools
from recipe.dag.policy.policy import PolicyRuntime
from recipe.dag.report.phases import announce
from recipe.dag.sandbox.launch import LocalSandbox
from recipe.dag.tools.code_interpreter import CodeInterpreter
from recipe.dag.tools.sandbox_client import SandboxClient, check_sandbox
from recipe.dag.tools.tool import Tool, check_tool, tool_name
from recipe.dag.train.mixing import Mixing
from recipe.dag.train.models import ModelPaths
from recipe.dag.train.rollout_processes import RolloutProcesses, SpreadRunner, choose_processes, cores
from recipe.dag.train.tool_columns import check_columns
from recipe.dag.train.turns import actor_updates
from recipe.dag.workflow.blocks import CodeInterpreterOptions
from recipe.dag.workflow.schema import ToolSpec, Workflow
from recipe.dag.workflow.user_code import load_object


async def start_policies(
    run: DictConfig, workflow: Workflow, models: ModelPaths, policies: dict[str, PolicyRuntime], *, platform: str
) -> None:
    """Launch every policy in turn, because a server sizes its memory by what is free when it starts.

    Each is put into `policies` before it is launched, so that the caller can end what has started when one fails; at
    the end they are in the workflow's order.
    """
    for share in plan_pools(workflow, nnodes=run.trainer.nnodes, n_gpus_per_node=run.trainer.n_gpus_per_node):
        pool = await asyncio.to_thread(create, share, platform=platform)
        actors = [name for name in share.policies if not workflow.policies[name].frozen]
        trained = len(actors) + sum(name in models.critics for name in actors)
        for name in share.policies:
            config = policy_config(
                run,
                workflow,
                name,
                model_path=models.policies[name],
                critic_path=models.critics.get(name),
                sharing=len(share.policies),
                crowded=len(share.policies) > 1 and trained > 1,
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
    for name in workflow.policies:
        policies[name] = policies.pop(name)


def open_mixing(
    run: DictConfig, workflow: Workflow, models: ModelPaths, policies: dict[str, PolicyRuntime], *, platform: str
) -> Mixing | None:
    """What learns the team's value, with its encoder beside the first trained policy; None for other estimators."""
    if models.encoder is None:
        return None
    announce("loading the mixer's text encoder")
    encoder, first = workflow.algorithm.team_value.encoder, workflow.trained_policies()[0]
    model = encoder.model or workflow.policies[first].model
    reader = start_encoder(
        policies[first].pool,
        models.encoder,
        platform=platform,
        chunk=encoder.chunk,
        tokenizer=model.tokenizer_path,
        trust=model.trust_remote_code,
    )
    return Mixing(workflow, reader, seed=run.seed, lock=None if platform == "cpu" else policies[first].pool.lock)


def own_tool(spec: ToolSpec, workflow: Workflow) -> Tool:
    """Make a tool of the user's own. Raises UserError where it cannot be made, or does not follow the protocol."""
    made = load_object(spec.path, workflow.path)
    try:
        tool = made(**spec.kwargs)
    except UserError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error} ({raised_at(error)})"
        raise UserError(f"tool {spec.path}: {text}; see its kwargs") from error
    check_tool(tool, spec.path)
    return tool


def tool_specs(workflow: Workflow) -> dict[str, ToolSpec]:
    """Return what the workflow's agents declare, each once."""
    return {tool.key: tool for agent in workflow.agents for tool in agent.tools}


def own_tools(workflow: Workflow) -> dict[str, Tool]:
    """Make the user's own tools that the workflow's agents have. Raises UserError."""
    return {key: own_tool(spec, workflow) for key, spec in tool_specs(workflow).items() if spec.path is not None}


def built_in_tools(workflow: Workflow, client: SandboxClient | None, **defaults: float) -> dict[str, Tool]:
    """Make the tools of this package that the workflow's agents have. `defaults`: options that these do not name."""
    tools: dict[str, Tool] = {}
    for key, spec in tool_specs(workflow).items():
        if spec.path is None:
            options = CodeInterpreterOptions(**spec.kwargs).model_dump(exclude_none=True)
            tools[key] = CodeInterpreter(client, **defaults | options)
    return tools


def interpreter_defaults(run: DictConfig) -> dict[str, float]:
    return {"timeout_s": run.sandbox.timeout_s, "memory_mb": run.sandbox.memory_mb}


def make_tools(workflow: Workflow, client: SandboxClient | None, **defaults: float) -> dict[str, Tool]:
    """Make all tools that the workflow's agents have. Raises UserError."""
    return own_tools(workflow) | built_in_tools(workflow, client, **defaults)


@dataclass(slots=True)
class Toolbox:
    """The tools that the workflow's agents declare, the sandbox behind them and behind its envs, and the processes that
    play large batches."""

    tools: dict[str, Tool] = field(default_factory=dict)
    sandbox: dict[str, Any] | None = None
    """SandboxClient's arguments."""
    client: SandboxClient | None = None
    local: LocalSandbox | None = None
    processes: RolloutProcesses | None = None

    @classmethod
    async def open(cls, run: DictConfig, workflow: Workflow, samples: Sequence[Mapping[str, Any]] = ()) -> Toolbox:
        """Start the local sandbox where no URL is configured. Raises UserError for a tool that cannot work, for a
        sample whose tools_kwargs ask for what no tool has, and if a configured sandbox does not answer."""
        box = cls()
        own = own_tools(workflow)
        built_in = {key: spec for key, spec in tool_specs(workflow).items() if spec.path is None}
        named = {tool_name(tool, key): tool for key, tool in own.items()}
        check_columns(samples, workflow, named | {str(spec): CodeInterpreter for spec in built_in.values()})
        if built_in or needs_sandbox(workflow):
            if run.sandbox.url:
                await check_sandbox(run.sandbox.url, token=run.sandbox.token)
                box.sandbox = {
                    "url": run.sandbox.url,
                    "max_concurrent": run.sandbox.max_concurrent,
                    "margin_s": run.sandbox.margin_s,
                    "token": run.sandbox.token,
                }
            else:
                announce("starting the sandbox")
                box.local = local = LocalSandbox(
                    isolation=run.sandbox.isolation, accept_unsandboxed=run.sandbox.accept_unsandboxed
                )
                box.sandbox = {
                    "url": await local.start(),
                    "max_concurrent": local.max_concurrent,
                    "token": local.token,
                }
            box.client = SandboxClient(**box.sandbox, on_unreachable=box.local and box.local.ensure)
        box.tools = own | (built_in_tools(workflow, box.client, **interpreter_defaults(run)) if built_in else {})
        return box

    async def start_processes(self, run: DictConfig, policies: Mapping[str, PolicyRuntime], *, episodes: int) -> None:
        """Start what plays batches of `episodes` beside this process, where the configuration says so."""
        count = choose_processes(run.rollout.processes, episodes, cores())
        if count == 1:
            return
        announce(f"starting {count} processes that play episodes")
        self.processes = await RolloutProcesses.start(
            count,
            {name: policy.spec() for name, policy in policies.items()},
            {name: policy.endpoint for name, policy in policies.items()},
            make_tools=partial(make_tools, **interpreter_defaults(run)),
            sandbox=self.sandbox,
            ensure=self.local and self.local.ensure,
            seed=run.seed,
        )

    def runner(
        self, run: DictConfig, workflow: Workflow, policies: Mapping[str, PolicyRuntime]
    ) -> EpisodeRunner | SpreadRunner:
        """Return what plays the workflow's episodes. Raises UserError."""
        endpoints = {name: policy.endpoint for name, policy in policies.items()}
        runner = EpisodeRunner(workflow, endpoints, self.tools, seed=run.seed, sandbox=self.client)
        if self.processes is None:
            return runner
        return SpreadRunner(runner, workflow, self.processes, run.rollout.processes)

    def metrics(self) -> dict[str, float]:
        """How often the local sandbox was started again since the run's start."""
        return {"sandbox/restarts": float(self.local.restarts)} if self.local is not None else {}

    async def close(self) -> None:
        try:
            if self.processes is not None:
                await self.processes.close()
        finally:  # whatever has become of Ray
            for tool in self.tools.values():
                await tool.close()
            if self.client is not None:
                await self.client.close()
            if self.local is not None:
                await self.local.stop()

"""From a configuration to running policies and tools.

Invariant: everything that the user may have got wrong is checked before the first process starts and before anything is
written.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig

from recipe.dag.errors import UserError
from recipe.dag.policy.config import policy_config
from recipe.dag.policy.placement import create, plan_pools
from recipe.dag.policy.policy import PolicyRuntime
from recipe.dag.sandbox.launch import LocalSandbox
from recipe.dag.tools.code_interpreter import CodeInterpreter
from recipe.dag.tools.sandbox_client import SandboxClient, check_sandbox
from recipe.dag.tools.tool import Tool
from recipe.dag.workflow.interpolation import resolve_env
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.user_code import load_object


def model_paths(workflow: Workflow) -> dict[str, str]:
    """Each policy's model, environment variables filled in; raises UserError for one that cannot be loaded."""
    from transformers import AutoConfig

    paths = {}
    for name, policy in workflow.policies.items():
        where = f"policies.{name}.model.path"
        path = resolve_env(policy.model.path, where)
        local = Path(path).expanduser()
        if not path.strip() or (not local.is_dir() and (path.startswith((".", "/", "~")) or path.count("/") != 1)):
            raise UserError(
                f"{where}: {path or '(empty)'} is no model directory; give a local folder or a hub name like org/model"
            )
        if local.is_dir() and not (local / "config.json").is_file():
            raise UserError(f"{where}: {path} holds no config.json, so it is no model directory")
        path = str(local) if local.is_dir() else path
        try:
            AutoConfig.from_pretrained(path, trust_remote_code=policy.model.trust_remote_code)
        except Exception as error:
            raise UserError(f"{where}: {path} cannot be loaded ({str(error).strip().splitlines()[0]})") from error
        paths[name] = path
    return paths


async def start_policies(
    run: DictConfig, workflow: Workflow, paths: dict[str, str], *, platform: str
) -> dict[str, PolicyRuntime]:
    """Launch every policy in turn: a server sizes its memory by what is free when it starts."""
    policies: dict[str, PolicyRuntime] = {}
    for share in plan_pools(workflow, nnodes=run.trainer.nnodes, n_gpus_per_node=run.trainer.n_gpus_per_node):
        pool = await asyncio.to_thread(create, share, platform=platform)
        for name in share.policies:
            spec = workflow.policies[name]
            config = policy_config(
                run, workflow, name, model_path=paths[name], sharing=len(share.policies), platform=platform
            )
            trained = not spec.frozen
            policies[name] = PolicyRuntime(name, config, pool, trained=trained, reference=trained and spec.reference)
            await policies[name].start()
    return {name: policies[name] for name in workflow.policies}


@dataclass(slots=True)
class Toolbox:
    """The tools that the workflow's agents declare, and the sandbox behind them."""

    tools: dict[str, Tool] = field(default_factory=dict)
    client: SandboxClient | None = None
    local: LocalSandbox | None = None

    @classmethod
    async def open(cls, run: DictConfig, workflow: Workflow) -> Toolbox:
        """Start the local sandbox where no URL is configured. Raises UserError if a configured one does not answer."""
        box = cls()
        names = {name for agent in workflow.agents for name in agent.tools}
        if "code_interpreter" in names:
            if run.sandbox.url:
                await check_sandbox(run.sandbox.url, token=run.sandbox.token)
                box.client = SandboxClient(
                    run.sandbox.url,
                    max_concurrent=run.sandbox.max_concurrent,
                    margin_s=run.sandbox.margin_s,
                    token=run.sandbox.token,
                )
            else:
                box.local = local = LocalSandbox(
                    isolation=run.sandbox.isolation, accept_unsandboxed=run.sandbox.accept_unsandboxed
                )
                url = await local.start()
                box.client = SandboxClient(
                    url, max_concurrent=local.max_concurrent, token=local.token, on_unreachable=local.ensure
                )
            box.tools["code_interpreter"] = CodeInterpreter(
                box.client, timeout_s=run.sandbox.timeout_s, memory_mb=run.sandbox.memory_mb
            )
        for name in names - box.tools.keys():
            box.tools[name] = load_object(name, workflow.path)()
        return box

    def metrics(self) -> dict[str, float]:
        """How often the local sandbox was started again since the run's start."""
        return {"sandbox/restarts": float(self.local.restarts)} if self.local is not None else {}

    async def close(self) -> None:
        for tool in self.tools.values():
            await tool.close()
        if self.client is not None:
            await self.client.close()
        if self.local is not None:
            await self.local.stop()

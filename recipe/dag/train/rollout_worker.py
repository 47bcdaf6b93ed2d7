"""A process that runs episodes for a run, and the messages that it exchanges with the run's own process.

Invariant: its episodes are those that the run's own process would have made, with its own copies of the workflow,
tools, hooks and server clients and the same seeds. It does not restart the run's sandbox; it asks the run to do so.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from recipe.dag.core.errors import UserError
from recipe.dag.episode.batch import play_batch
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.episode.shipment import pack
from recipe.dag.episode.tool_limits import share_limits
from recipe.dag.policy.policy import PolicySpec
from recipe.dag.remote.connect import ApiSpec
from recipe.dag.tools.sandbox import raise_limit
from recipe.dag.tools.sandbox_client import SandboxClient
from recipe.dag.types.record import Episode
from recipe.dag.types.tool import Tool, close_tool
from recipe.dag.workflow.schema import Workflow

SHIP_EVERY_S = 0.2
Samples = Sequence[tuple[dict[str, Any], str]]
"""(problem, uid) of each sample."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The settings of a worker process. Its limits are those of all workers together."""

    policies: Mapping[str, PolicySpec | ApiSpec]
    make_tools: Callable[[Workflow, SandboxClient | None], dict[str, Tool]]
    seed: int
    sandbox: Mapping[str, Any] | None = None
    """SandboxClient's arguments."""
    restarts: bool = False
    """True if the run can restart the sandbox."""
    folder: str = field(default_factory=os.getcwd)
    """Working directory."""
    path: tuple[str, ...] = field(default_factory=lambda: tuple(os.path.abspath(entry) for entry in sys.path))
    """Entries of `sys.path`."""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    threads: int = 1
    """Threads of the tokenizers."""
    share: tuple[int, int] = (0, 1)
    """The worker's index and the number of workers, among which the limits of tools and APIs are divided."""


class RolloutWorker:
    """One worker process: an async Ray actor."""

    def __init__(self, spec: WorkerSpec):
        os.chdir(spec.folder)
        sys.path += [entry for entry in spec.path if entry not in sys.path]
        os.environ |= {name: value for name, value in spec.environ.items() if name not in os.environ}
        os.environ["RAYON_NUM_THREADS"] = str(spec.threads)
        raise_limit()
        self._spec = spec
        self._endpoints = {
            name: (policy.share(*spec.share) if isinstance(policy, ApiSpec) else policy).endpoint()
            for name, policy in spec.policies.items()
        }
        self._runners: dict[tuple[str, ...], EpisodeRunner] = {}
        self._tools: dict[str, Tool] | None = None
        recover = self._request_restart if spec.restarts else None
        self._sandbox = SandboxClient(**spec.sandbox, on_unreachable=recover) if spec.sandbox else None
        self._lock = threading.Lock()  # guards the restart request: envs await it on other event loops
        self._restart: Future[None] | None = None
        """The request to restart the sandbox that the run has not answered yet."""
        self._restart_sent = True
        self._task: asyncio.Task | None = None

    async def ready(self) -> None:
        """Return once the process has started."""

    async def run_episodes(
        self, workflow: Workflow, samples: Samples, n: int, options: dict[str, Any]
    ) -> AsyncIterator[tuple[str, Any]]:
        """Yield ("episodes", finished ones, packed), ("sandbox", None) if the sandbox does not answer, and ("error",
        text) if an error in the user's code ends the run."""
        ended: list[Episode] = []
        try:
            runner = self._runner(workflow)
            self._task = asyncio.ensure_future(play_batch(runner, samples, n, on_done=ended.append, **options))
            while ended or not self._task.done():
                await asyncio.wait((self._task,), timeout=SHIP_EVERY_S)
                batch = ended.copy()
                ended.clear()
                if batch:
                    yield "episodes", [pack(episode) for episode in batch]
                if not self._restart_sent:
                    self._restart_sent = True
                    yield "sandbox", None
            await self._task
        except UserError as error:
            yield "error", str(error)

    async def sandbox_checked(self) -> None:
        """Receive the run's answer to ("sandbox", None)."""
        with self._lock:
            restart, self._restart = self._restart, None
        if restart is not None:
            restart.set_result(None)

    async def stop(self) -> None:
        """Cancel a running `run_episodes`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.sandbox_checked()

    async def close(self) -> None:
        for tool in (self._tools or {}).values():
            await close_tool(tool)
        if self._sandbox is not None:
            await self._sandbox.close()

    def _runner(self, workflow: Workflow) -> EpisodeRunner:
        key = tuple(agent.policy for agent in workflow.agents)
        if key not in self._runners:
            if self._tools is None:
                self._tools = self._spec.make_tools(workflow, self._sandbox)
                share_limits(self._tools, *self._spec.share)
            self._runners[key] = EpisodeRunner(
                workflow, self._endpoints, self._tools, seed=self._spec.seed, sandbox=self._sandbox
            )
        return self._runners[key]

    async def _request_restart(self) -> None:
        """Ask the run to restart the sandbox and wait for its answer; safe on any event loop of this process."""
        with self._lock:
            if self._restart is None:
                self._restart, self._restart_sent = Future(), False
            restart = self._restart
        await asyncio.shield(asyncio.wrap_future(restart))  # a cancelled caller must not cancel it for all

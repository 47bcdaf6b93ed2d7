"""A process that plays episodes for a run: what it is told, and what it hands over.

Invariant: it plays what the run's own process would have played, with a workflow, tools, hooks and server clients of
its own and the same seeds. It restarts nothing that is the run's: it asks.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from recipe.dag.episode.batch import play_batch
from recipe.dag.episode.record import Episode
from recipe.dag.episode.runner import EpisodeRunner
from recipe.dag.episode.shipment import pack
from recipe.dag.errors import UserError
from recipe.dag.open_files import raise_limit
from recipe.dag.policy.policy import PolicySpec
from recipe.dag.tools.sandbox_client import SandboxClient
from recipe.dag.tools.tool import Tool
from recipe.dag.workflow.schema import Workflow

SHIP_EVERY_S = 0.2
Samples = Sequence[tuple[dict[str, Any], str]]
"""(problem, uid) each."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a process is told once."""

    policies: Mapping[str, PolicySpec]
    sandbox: Mapping[str, Any] | None
    """SandboxClient's arguments."""
    restarts: bool
    """The run can restart the sandbox."""
    make_tools: Callable[[Workflow, SandboxClient | None], dict[str, Tool]]
    seed: int
    threads: int
    """For tokenizing."""
    folder: str
    path: tuple[str, ...]
    environ: Mapping[str, str]


class RolloutWorker:
    """One process; an async actor of Ray's."""

    def __init__(self, spec: WorkerSpec):
        os.chdir(spec.folder)
        sys.path += [place for place in spec.path if place not in sys.path]
        os.environ |= {name: value for name, value in spec.environ.items() if name not in os.environ}
        os.environ["RAYON_NUM_THREADS"] = str(spec.threads)
        raise_limit()
        self._spec = spec
        self._endpoints = {name: policy.endpoint() for name, policy in spec.policies.items()}
        self._runners: dict[tuple[str, ...], EpisodeRunner] = {}
        self._tools: dict[str, Tool] | None = None
        recover = self._ask_for_sandbox if spec.restarts else None
        self._sandbox = SandboxClient(**spec.sandbox, on_unreachable=recover) if spec.sandbox else None
        self._lock = threading.Lock()  # over the next two: envs have loops of their own
        self._asked: Future[None] | None = None
        self._told = True
        self._task: asyncio.Task | None = None

    async def ready(self) -> None:
        """Returns once the process has started."""

    async def play(
        self, workflow: Workflow, samples: Samples, n: int, options: dict[str, Any]
    ) -> AsyncIterator[tuple[str, Any]]:
        """Yield ("episodes", packed ones that have ended), ("sandbox", None) where that does not answer, and ("error",
        text) where an error of the user's code ends the run."""
        ended: list[Episode] = []
        try:
            runner = self._runner(workflow)
            self._task = asyncio.ensure_future(play_batch(runner, samples, n, on_done=ended.append, **options))
            while ended or not self._task.done():
                await asyncio.wait((self._task,), timeout=SHIP_EVERY_S)
                batch, ended[:] = ended[:], []
                if batch:
                    yield "episodes", [pack(episode) for episode in batch]
                if not self._told:
                    self._told = True
                    yield "sandbox", None
            await self._task
        except UserError as error:
            yield "error", str(error)

    async def sandbox_was_looked_at(self) -> None:
        """The answer to ("sandbox", None)."""
        with self._lock:
            asked, self._asked = self._asked, None
        if asked is not None:
            asked.set_result(None)

    async def stop(self) -> None:
        """End what `play` has begun."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.sandbox_was_looked_at()

    async def close(self) -> None:
        for tool in (self._tools or {}).values():
            await tool.close()
        if self._sandbox is not None:
            await self._sandbox.close()

    def _runner(self, workflow: Workflow) -> EpisodeRunner:
        key = tuple(agent.policy for agent in workflow.agents)
        if key not in self._runners:
            if self._tools is None:
                self._tools = self._spec.make_tools(workflow, self._sandbox)
            self._runners[key] = EpisodeRunner(
                workflow, self._endpoints, self._tools, seed=self._spec.seed, sandbox=self._sandbox
            )
        return self._runners[key]

    async def _ask_for_sandbox(self) -> None:
        """May be awaited on any loop of this process."""
        with self._lock:
            if self._asked is None:
                self._asked, self._told = Future(), False
            asked = self._asked
        await asyncio.shield(asyncio.wrap_future(asked))  # one that is given up must not cancel it for the others

"""From a sample to a finished episode, whatever goes wrong on the way.

Invariant: `run` returns an episode or raises UserError; nothing that one episode's code, model or tools do reaches
another. Each attempt starts from a fresh copy of the sample, with fresh envs and tool state and the same seeds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from recipe.dag.episode.call import Attempt, Caller
from recipe.dag.episode.client import PolicyEndpoint
from recipe.dag.episode.compute import load_compute
from recipe.dag.episode.copying import plain_copy
from recipe.dag.episode.env_class import load_envs
from recipe.dag.episode.failure import check_masked, decide, describe, pause_s, run_error
from recipe.dag.episode.graph import EpisodeNode, episode_graph
from recipe.dag.episode.record import Episode
from recipe.dag.episode.reward import load_rewards, score
from recipe.dag.episode.tasks import limited
from recipe.dag.episode.turns import Rollout
from recipe.dag.errors import Fault, TimeoutFault, UserError, boundary
from recipe.dag.tools.sandbox_client import SandboxClient
from recipe.dag.tools.tool import Tool
from recipe.dag.workflow.schema import Workflow

log = logging.getLogger(__name__)


class EpisodeRunner:
    """Runs episodes of one workflow, any number at once."""

    def __init__(
        self,
        workflow: Workflow,
        endpoints: dict[str, PolicyEndpoint],
        tools: dict[str, Tool],
        *,
        seed: int,
        sandbox: SandboxClient | None = None,
    ) -> None:
        """Loads all user code and checks what can be checked before the first episode. `sandbox`: for the envs that ask
        for one. Raises UserError."""
        self._workflow, self._seed = workflow, seed
        if not workflow.rollout_nodes:
            raise UserError(f"{workflow.path}: no ROLLOUT node, so there is nothing to run")
        self._graph = episode_graph(workflow)
        self._movers = {
            place.id: _caller(place, workflow, endpoints, tools) if place.agent else load_compute(place, workflow)
            for place in self._graph.nodes
        }
        self._envs = load_envs(workflow, sandbox)
        self._rewards = load_rewards(workflow)
        self._share = workflow.algorithm.share_reward_in_agent
        if self._share and workflow.algorithm.spans_policies:
            name = workflow.algorithm.estimator
            raise UserError(f"{workflow.path}: {name} carries rewards back itself; remove share_reward_in_agent")
        agents = [workflow.agent_of(node) for node in workflow.rollout_nodes]
        self._trained = frozenset(agent.name for agent in agents if not workflow.policies[agent.policy].frozen)

    async def run(self, sample: dict[str, Any], uid: str, index: int, *, step: int, validate: bool = False) -> Episode:
        """One episode. A fault that ended it stands in `episode.fault`. Raises UserError for an error of the user's
        code (unless the workflow says `on_user_error: mask`), and for any fault where it says `on_failure: fail`."""
        if not isinstance(prompt := sample.get("prompt"), list):
            raise UserError(f"sample {uid}: `prompt` must be a list of chat messages, not {type(prompt).__name__}")
        spec, started, attempts = self._workflow.episode, time.perf_counter(), 0
        faults: list[dict[str, Any]] = []
        while True:
            attempts += 1
            episode = Episode(uid, index, plain_copy(sample), faults=faults, attempts=attempts)
            fault = await self._attempt(Attempt(episode, self._seed, step, validate, started))
            episode.seconds = time.perf_counter() - started
            if fault is None:
                return episode
            if asyncio.current_task().cancelling():
                # A fault raised while the tasks of a cancelled episode were wound up must not keep it alive.
                raise asyncio.CancelledError
            episode.fault = fault.record()
            faults.append(episode.fault)
            decision = decide(fault, spec, attempt=attempts)
            log.info("episode %s-%s attempt %s: %s: %s", uid, index, attempts, decision, describe(episode.fault))
            if decision == "mask":
                return episode
            if decision == "fail":
                raise run_error(fault, f"episode {uid}-{index}", spec) from fault
            await asyncio.sleep(pause_s(attempts))

    def check_masked(self, episodes: Sequence[Episode], title: str) -> None:
        """Raises UserError where more of a batch's episodes failed than the workflow allows."""
        check_masked(episodes, self._workflow.episode, title)

    async def _attempt(self, attempt: Attempt) -> Fault | None:
        spec = self._workflow.episode
        try:
            with boundary(Fault):
                async with limited(spec.timeout_s, TimeoutFault, "the episode"):
                    await Rollout(self._graph, self._movers, self._envs, spec, attempt).play()
                    await score(
                        attempt.episode,
                        self._rewards,
                        agents={agent.name for agent in self._workflow.agents},
                        trained=self._trained,
                        limit_s=spec.call_timeout_s,
                        share_in_agent=self._share,
                    )
        except Fault as fault:
            return fault
        return None


def _caller(
    place: EpisodeNode, workflow: Workflow, endpoints: dict[str, PolicyEndpoint], tools: dict[str, Tool]
) -> Caller:
    agent = place.agent
    if agent.policy not in endpoints:
        raise UserError(f"agent {agent.name}: no server for its policy {agent.policy}")
    return Caller(place, workflow, endpoints[agent.policy], tools)

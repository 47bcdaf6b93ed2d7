"""Runs one episode from a sample, with retries.

Invariant: `run` returns an episode or raises UserError; nothing that one episode's code, model or tools do affects
another. Each attempt starts from a fresh copy of the sample, with fresh envs and tool state and the same seeds.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from recipe.dag.core.errors import Fault, TimeoutFault, UserError, boundary
from recipe.dag.core.tasks import limited
from recipe.dag.endpoint.client import Endpoint, PolicyEndpoint
from recipe.dag.episode.agent_runner import AgentRunner
from recipe.dag.episode.attempt import Attempt
from recipe.dag.episode.candidates import load_choices
from recipe.dag.episode.compute import load_compute
from recipe.dag.episode.env_class import load_envs
from recipe.dag.episode.failure import check_masked, decide, describe, pause_s, run_error
from recipe.dag.episode.fork import Fork, key_of, recorded_calls
from recipe.dag.episode.graph import EpisodeNode, episode_graph
from recipe.dag.episode.group_reward import score_groups
from recipe.dag.episode.reward import load_rewards, run_reward, score, settle
from recipe.dag.episode.rollout import NodeRunner, Rollout
from recipe.dag.episode.token_model import check_options
from recipe.dag.tools.sandbox_client import SandboxClient
from recipe.dag.types.record import Episode
from recipe.dag.types.tool import Tool
from recipe.dag.types.usage import Usage, with_calls
from recipe.dag.types.values import plain_copy
from recipe.dag.workflow.schema import Workflow

log = logging.getLogger(__name__)


class EpisodeRunner:
    """Runs episodes of one workflow, any number of them concurrently."""

    def __init__(
        self,
        workflow: Workflow,
        endpoints: Mapping[str, Endpoint],
        tools: dict[str, Tool],
        *,
        seed: int,
        sandbox: SandboxClient | None = None,
    ) -> None:
        """Load all user code and check what can be checked before the first episode. `endpoints` by policy; `tools` by
        `ToolSpec.key`; `sandbox` for the envs that ask for one. Raises UserError."""
        self._workflow, self._seed = workflow, seed
        if not workflow.rollout_nodes:
            raise UserError(f"{workflow.path}: needs at least one ROLLOUT node")
        self.graph = episode_graph(workflow)
        self._runners = {node.id: _runner_of(node, workflow, endpoints, tools) for node in self.graph.nodes}
        self._envs = load_envs(workflow, sandbox)
        self._choices = load_choices(workflow)
        rewards = load_rewards(workflow)
        self._rewards = tuple(node for node in rewards if not node.late)
        self._late_rewards = tuple(node for node in rewards if node.late)
        self._agents = frozenset(agent.name for agent in workflow.agents)
        self._share = workflow.algorithm.share_reward_in_agent
        if self._share and workflow.algorithm.spans_policies:
            name = workflow.algorithm.estimator
            raise UserError(f"{workflow.path}: {name} already propagates rewards; remove share_reward_in_agent")
        agents = [workflow.agent_of(node) for node in workflow.rollout_nodes]
        self._trained = frozenset(agent.name for agent in agents if not workflow.policies[agent.policy].frozen)

    @property
    def scores_groups(self) -> bool:
        """Whether some rewards are known only when the whole group has finished."""
        return bool(self._late_rewards)

    async def run(
        self,
        sample: dict[str, Any],
        uid: str,
        index: int,
        *,
        step: int,
        validate: bool = False,
        fork: Fork | None = None,
    ) -> Episode:
        """Return one finished episode; `episode.fault` is the fault that ended it, if any. fork: what some calls get in
        place of an answer of their policy. Raises UserError for an error of the user's code (unless `on_user_error:
        mask`), and for any fault if `on_failure: fail`."""
        if not isinstance(prompt := sample.get("prompt"), list):
            raise UserError(f"sample {uid}: `prompt` must be a list of chat messages, not {type(prompt).__name__}")
        spec, started, attempts, fork = self._workflow.episode, time.perf_counter(), 0, fork or Fork()
        faults: list[dict[str, Any]] = []
        usage: dict[str, Usage] = {}
        while True:
            attempts += 1
            episode = Episode(uid, index, plain_copy(sample), faults=faults, attempts=attempts, forked=fork.forked)
            fault = await self._attempt(Attempt(episode, self._seed, step, validate, started, fork))
            episode.seconds = time.perf_counter() - started
            fork.mark(episode)
            usage = episode.usage = with_calls(usage, episode.all_calls)
            if fault is None:
                return episode
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # A fault raised while a cancelled episode was shutting down must not hide the cancellation.
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

    def forks_of(self, trunk: Episode, *, step: int, policies: Collection[str]) -> list[Fork]:
        """Return the forks of an episode of a training step, in which its algorithm has decisions of `policies` made
        again."""
        forks = self._workflow.algorithm.forks
        if forks is None or trunk.fault is not None:
            return []
        own = [c for c in trunk.calls if c.policy in policies and c.train and 1 in c.response_mask]
        drawn = random.Random(f"{self._seed} {step} {trunk.uid} {trunk.index}")
        chosen = sorted(drawn.sample(range(len(own)), min(len(own), forks.decisions or len(own))))
        at = [key_of(own[position])[:3] for position in chosen]
        repeated = [Fork(*recorded_calls(self.graph, trunk, [slot]), trunk=trunk, at=slot) for slot in at]
        return [fork for fork in repeated for _ in range(forks.alternatives - 1)]

    async def finish(self, episodes: Sequence[Episode], title: str, *, earlier: Sequence[Episode] = ()) -> None:
        """Run the reward nodes that need whole groups, which the `earlier` episodes belong to, too. Raises UserError,
        and TooManyFailed if more of the episodes failed than the workflow allows."""
        if self._late_rewards:
            await score_groups([*earlier, *episodes], self._score_group, self._workflow.episode)
        failed = [episode for episode in earlier if episode.fault is not None]
        check_masked([*episodes, *failed], self._workflow.episode, title)

    async def _score_group(self, group: Sequence[Episode]) -> None:
        limit_s = self._workflow.episode.call_timeout_s
        for node in self._late_rewards:
            for scored in [group] if node.of_group else [[episode] for episode in group]:
                await run_reward(node, scored, self._agents, limit_s)
        for episode in group:
            settle(episode, self._late_rewards, trained=self._trained, share_in_agent=self._share)

    async def _attempt(self, attempt: Attempt) -> Fault | None:
        spec = self._workflow.episode
        try:
            with boundary(Fault):
                async with limited(spec.timeout_s, TimeoutFault, "the episode"):
                    await Rollout(self.graph, self._runners, self._envs, spec, attempt, self._choices).run()
                    attempt.fork.check(attempt.episode)
                    await score(
                        attempt.episode,
                        self._rewards,
                        agents=self._agents,
                        # what its group will earn is not known yet
                        trained=() if self._late_rewards else self._trained,
                        limit_s=spec.call_timeout_s,
                        share_in_agent=self._share and not self._late_rewards,
                    )
        except Fault as fault:
            return fault
        return None


def _runner_of(
    node: EpisodeNode, workflow: Workflow, endpoints: Mapping[str, Endpoint], tools: dict[str, Tool]
) -> NodeRunner:
    if node.agent is None:
        return load_compute(node, workflow)
    endpoint = endpoints.get(node.agent.policy)
    if endpoint is None:
        raise UserError(f"agent {node.agent.name}: its policy {node.agent.policy} has no server")
    own = {name: endpoints.get(name) for name in workflow.policies_of(node.agent)}
    check_options(node.agent, {name: one.tokenizer for name, one in own.items() if isinstance(one, PolicyEndpoint)})
    return AgentRunner(node, workflow, endpoint, tools)

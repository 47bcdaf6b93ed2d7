"""The envs of one episode: created, stepped by the nodes that name them, closed.

Invariant: an env exists once per episode, under the name by which nodes share it. Every step has one action per player,
even if some players were skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from recipe.dag.core.errors import EnvFault, boundary
from recipe.dag.core.tasks import together
from recipe.dag.episode.attempt import env_seed
from recipe.dag.episode.env import LiveEnv
from recipe.dag.episode.env_class import EnvClass, choose_env
from recipe.dag.episode.graph import EpisodeGraph, EpisodeNode
from recipe.dag.episode.reward import pay
from recipe.dag.episode.view import Turn
from recipe.dag.types.markup import after_thinking
from recipe.dag.types.record import Call


class EpisodeEnvs:
    def __init__(
        self, graph: EpisodeGraph, classes: Mapping[str, EnvClass], sample: dict[str, Any], limit_s: float
    ) -> None:
        """`classes` by the entry of `env`. Raises EnvFault if none fits the sample."""
        self._graph, self._sample = graph, sample
        chosen = {node.id: choose_env(node.spec, sample) for node in graph.nodes}
        self.env_of = {node: env for node, env in chosen.items() if env is not None}
        """The env that each node steps, by node id; in causal order."""
        self._players = graph.players(self.env_of)
        watching = [node.id for node in graph.nodes if node.spec.sees_env]
        watchers = list(dict.fromkeys(self._agents([*watching, *self.env_of])))
        names = dict.fromkeys(self.env_of.values())
        self._envs = {name: LiveEnv(classes[name], watchers, limit_s) for name in names}

    async def reset(self, seed: int, uid: str) -> dict[str, dict[str, Any]]:
        """Create the envs and return their first observations, by node and then by agent name."""
        # If several nodes step one env, its first observation belongs to the first of them.
        owners = {env: node for node, env in reversed(self.env_of.items())}

        async def reset(name: str, env: LiveEnv) -> dict[str, Any]:
            players = self._agents(self._players[owners[name]])
            return await env.reset(self._sample, env_seed(seed, uid=uid, env=name), players)

        observations = await together(reset(name, env) for name, env in self._envs.items())
        return {owners[name]: obs for name, obs in zip(self._envs, observations, strict=True)}

    @property
    def tool_state(self) -> dict[str, dict[str, Any]]:
        """Return what the envs add to the tools' state of this episode, by tool name."""
        state: dict[str, dict[str, Any]] = {}
        for env in self._envs.values():
            for tool, entries in env.tool_state.items():
                state[tool] = state.get(tool, {}) | entries
        return state

    async def step(self, node: EpisodeNode, round_index: int, turn: Turn) -> None:
        """Step the node's env and record the result in `turn`."""
        slot, players = (node.id, round_index), self._players[node.id]
        calls = [self._call_of(name, round_index, node.loop, turn) for name in players]
        result = await self._envs[self.env_of[node.id]].step(
            [_action(call) for call in calls],
            self._sample.get("ground_truth"),
            self._agents(players),
            [call is not None for call in calls],
            agent=node.agent_name,
        )
        turn.obs[slot], turn.infos[slot] = result.obs, result.info
        turn.calls[slot].env_info = result.info
        turn.calls[slot].next_observation = _text(result.obs.get(node.agent_name), node.id)
        if result.done:
            turn.calls[slot].done = True
            turn.done.add(slot)
        if node.spec.env_pays:
            for call, reward in zip(calls, result.rewards, strict=True):
                if call is not None:
                    pay(call, node.id, reward)

    def infos(self, by_node: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the newest info of each node's env. `by_node`: the infos by the node that stepped, newest last."""
        newest = {self.env_of[node]: info for node, info in by_node.items()}
        return {node: newest[env] for node, env in self.env_of.items() if env in newest}

    async def close(self) -> list[EnvFault]:
        """Close all envs and return the faults. Envs that were never created are skipped."""
        return [fault for fault in await together(_close(env) for env in self._envs.values()) if fault]

    def _call_of(self, node: str, round_index: int, loop: str | None, turn: Turn) -> Call | None:
        """Return the player's call of this round, or its latest one for an env outside its loop; None if skipped."""
        if self._graph.by_id[node].loop == loop:
            return turn.calls.get((node, round_index))
        return next((turn.calls[slot] for slot in reversed(turn.calls) if slot[0] == node), None)

    def _agents(self, nodes: Iterable[str]) -> list[str]:
        return [self._graph.by_id[node].agent_name for node in nodes]


def _action(call: Call | None) -> str:
    """Return the text that the env gets: "" if the node was skipped or its model never reached an answer."""
    if call is None:
        return ""
    answered = not call.ended_in_tool_call and after_thinking(call.text, opened=call.opened_thinking)
    # A text that a hook wrote in place of the model's is an answer in any case.
    return call.text if answered or call.completion is not None else ""


def _text(obs: Any, node: str) -> str:
    with boundary(EnvFault, f"node {node}"):
        return "" if obs is None else str(obs)


async def _close(env: LiveEnv) -> EnvFault | None:
    try:
        await env.close()
    except EnvFault as fault:
        return fault
    return None

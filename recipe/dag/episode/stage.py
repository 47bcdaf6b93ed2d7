"""The envs of one episode: made, stepped by the nodes that own a step, closed.

Invariant: an env exists once per episode, under the name by which nodes share it. Every step has one action per player,
whoever was skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipe.dag.episode.env import LiveEnv
from recipe.dag.episode.env_class import EnvClass, choose_env
from recipe.dag.episode.graph import EpisodeGraph, EpisodeNode
from recipe.dag.episode.markup import after_thinking
from recipe.dag.episode.record import Call
from recipe.dag.episode.reward import pay
from recipe.dag.episode.seeds import env_seed
from recipe.dag.episode.tasks import together
from recipe.dag.episode.view import Turn
from recipe.dag.errors import EnvFault


class Stage:
    """One episode's envs."""

    def __init__(
        self, graph: EpisodeGraph, classes: Mapping[str, EnvClass], sample: dict[str, Any], limit_s: float
    ) -> None:
        """`classes` by the entry of env_path. Raises EnvFault where none fits the sample."""
        self._graph, self._sample = graph, sample
        chosen = {place.id: choose_env(place.node, sample) for place in graph.nodes}
        self.env_of = {node: env for node, env in chosen.items() if env is not None}
        """By the node that steps it; in causal order."""
        self._players = graph.players(self.env_of)
        watching = [place.id for place in graph.nodes if place.node.agent_options.obs_with_env]
        watchers = self._agents(dict.fromkeys([*watching, *self.env_of]))
        names = dict.fromkeys(self.env_of.values())
        self._envs = {name: LiveEnv(classes[name], list(dict.fromkeys(watchers)), limit_s) for name in names}

    async def reset(self, seed: int, uid: str) -> dict[str, dict[str, Any]]:
        """Make the envs; returns their first observations by node, then by agent name."""
        # Where several nodes step one env, it is given to the first of them.
        owners = {env: node for node, env in reversed(self.env_of.items())}

        async def reset(name: str, env: LiveEnv) -> dict[str, Any]:
            players = self._agents(self._players[owners[name]])
            return await env.reset(self._sample, env_seed(seed, uid=uid, env=name), players)

        found = await together(reset(name, env) for name, env in self._envs.items())
        return {owners[name]: obs for name, obs in zip(self._envs, found, strict=True)}

    async def step(self, place: EpisodeNode, round: int, turn: Turn) -> dict[str, Any]:
        """Step the node's env and write down in `turn` what it said; returns its observations by agent name."""
        slot, players = (place.id, round), self._players[place.id]
        played = [self._played(name, round, place.loop, turn) for name in players]
        actions = [_action(call) for call in played]
        said = await self._envs[self.env_of[place.id]].step(
            actions, self._sample.get("ground_truth"), self._agents(players), [call is not None for call in played]
        )
        turn.obs[slot], turn.infos[slot] = said.obs, said.info
        turn.calls[slot].env_info = said.info
        if said.done:
            turn.done.add(slot)
        if place.node.agent_options.rewards_with_env:
            for call, reward in zip(played, said.rewards, strict=True):
                if call is not None:
                    pay(call, place.id, reward)
        return said.obs

    def infos(self, by_node: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """What is known of the env of each node. `by_node`: by the node that stepped, the newest last."""
        newest = {self.env_of[node]: info for node, info in by_node.items()}
        return {node: newest[env] for node, env in self.env_of.items() if env in newest}

    async def close(self) -> list[EnvFault]:
        """What went wrong. Envs that were never made are skipped."""
        return [fault for fault in await together(_close(env) for env in self._envs.values()) if fault]

    def _played(self, node: str, round: int, loop: str | None, turn: Turn) -> Call | None:
        """Its call of this round, or for an env outside of its loop the latest; None where it was skipped."""
        if self._graph.by_id[node].loop == loop:
            return turn.calls.get((node, round))
        return next((turn.calls[slot] for slot in reversed(turn.calls) if slot[0] == node), None)

    def _agents(self, nodes: Mapping[str, Any] | tuple[str, ...]) -> list[str]:
        return [self._graph.by_id[node].agent.name for node in nodes]


def _action(call: Call | None) -> str:
    """What the env is given; "" where the node was skipped, or its model never came to an answer."""
    if call is None:
        return ""
    silent = call.ended_in_tool_call or not after_thinking(call.text, opened=call.opened_thinking)
    return "" if silent and call.completion is None else call.text


async def _close(env: LiveEnv) -> EnvFault | None:
    try:
        await env.close()
    except EnvFault as fault:
        return fault
    return None

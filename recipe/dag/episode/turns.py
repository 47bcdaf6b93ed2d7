"""One run of the rollout nodes on one sample: its turns, its envs, who sees what.

Invariant: what a node sees follows from the graph, not from the clock. It sees this turn's calls of its ancestors and
the turn before's of all others, and an env's new observation in this turn only if it depends on the node that stepped
the env.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from recipe.dag.episode.call import Attempt, Caller
from recipe.dag.episode.context import Context
from recipe.dag.episode.env import EnvClass, LiveEnv
from recipe.dag.episode.hooks import Answer
from recipe.dag.episode.record import Call, Episode, ToolResult
from recipe.dag.episode.seeds import env_seed
from recipe.dag.episode.tasks import together
from recipe.dag.errors import EnvFault
from recipe.dag.workflow.schema import EpisodeSpec


@dataclass(slots=True)
class Turn:
    """What the nodes of one turn have done so far, by node id."""

    number: int
    calls: dict[str, Call] = field(default_factory=dict)
    called: dict[str, asyncio.Event] = field(default_factory=dict)
    """Set when a node's call is over."""
    finished: dict[str, asyncio.Event] = field(default_factory=dict)
    """Set when its env, if it has one, has stepped too."""
    obs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the node that stepped the env, then by agent name."""
    transcripts: dict[str, str] = field(default_factory=dict)
    """Of the nodes whose post_process returned token ids, siiRL's way."""
    done: bool = False


class Rollout:
    """Plays one attempt."""

    def __init__(
        self, callers: Sequence[Caller], envs: Mapping[str, EnvClass], spec: EpisodeSpec, attempt: Attempt
    ) -> None:
        """`callers` in topological order; `envs` by the path that nodes name."""
        self._callers, self._spec, self._attempt = callers, spec, attempt
        self._episode: Episode = attempt.episode
        self._agent_of = {caller.place.id: caller.agent.name for caller in callers}
        watching = [caller.agent.name for caller in callers if caller.place.node.agent_options.obs_with_env]
        watching += [caller.agent.name for caller in callers if caller.place.env]
        watchers = list(dict.fromkeys(watching))
        self._envs = {path: LiveEnv(env, watchers, spec.call_timeout_s) for path, env in envs.items()}
        self._before = Turn(-1)

    async def play(self) -> None:
        """All turns. The episode's calls are there even if it raises, those under way included."""
        try:
            await self._reset()
            for number in range(self._spec.max_turns):
                turn = Turn(number)
                try:
                    await self._play_turn(turn)
                finally:
                    # In the nodes' order, whichever came first.
                    self._episode.calls += [turn.calls[c.place.id] for c in self._callers if c.place.id in turn.calls]
                self._episode.turns = number + 1
                self._before = turn
                if turn.done:
                    self._episode.done = True
                    return
        finally:
            await together(self._close(env) for env in self._envs.values())

    async def _reset(self) -> None:
        # Where several nodes step one env, its first observation is given to the first of them.
        owners = {caller.place.env: caller.place for caller in reversed(self._callers) if caller.place.env}

        async def reset(path: str, env: LiveEnv) -> None:
            place = owners[path]
            seed = env_seed(self._attempt.seed, uid=self._episode.uid, env=path)
            players = [self._agent_of[name] for name in place.players]
            self._before.obs[place.id] = await env.reset(self._episode.sample, seed, players)

        await together(reset(path, env) for path, env in self._envs.items())

    async def _close(self, env: LiveEnv) -> None:
        try:
            await env.close()
        except EnvFault as fault:
            # What the episode earned is known by now: counted, but no reason to lose it.
            self._episode.faults.append(fault.record())

    async def _play_turn(self, turn: Turn) -> None:
        for caller in self._callers:
            turn.called[caller.place.id], turn.finished[caller.place.id] = asyncio.Event(), asyncio.Event()
        await together(self._play_node(caller, turn) for caller in self._callers)
        turn.obs = {**self._before.obs, **turn.obs}

    async def _play_node(self, caller: Caller, turn: Turn) -> None:
        place = caller.place
        for name in place.ancestors:
            await turn.finished[name].wait()
        call = Call(place.id, place.agent.name, place.node.agent_group, place.agent.policy, turn.number)
        context = self._context(caller, call, turn)
        transcript = self._transcript(context.upstream, turn)
        turn.calls[place.id] = call
        answer = await caller.move(call, context, self._attempt, transcript)
        self._take(answer, caller, turn)
        turn.called[place.id].set()
        if place.env is not None:
            await self._step(caller, turn)
        turn.finished[place.id].set()

    def _context(self, caller: Caller, call: Call, turn: Turn) -> Context:
        place, episode = caller.place, self._episode
        upstream = {}
        for other in self._callers:
            calls = turn.calls if other.place.id in place.ancestors else self._before.calls
            if other.place.id in calls:
                upstream[other.place.id] = calls[other.place.id]
        this_turn = [turn.calls[name] for name in upstream if name in place.ancestors]
        return Context(
            sample=episode.sample,
            uid=episode.uid,
            episode=episode.index,
            turn=turn.number,
            max_turns=self._spec.max_turns,
            agent=call.agent,
            node=call.node,
            upstream=upstream,
            history=[c for c in [*episode.calls, *this_turn] if c.agent == call.agent],
            obs=self._obs(caller, turn),
            validate=self._attempt.validate,
            call_tool=partial(_call_tool, caller, call, self._attempt),
        )

    def _obs(self, caller: Caller, turn: Turn) -> Any:
        place, found = caller.place, None
        if not place.node.agent_options.obs_with_env:
            return None
        fresh = {other.place.id: turn.obs[other.place.id] for other in self._callers if other.place.id in turn.obs}
        fresh = {owner: obs for owner, obs in fresh.items() if owner in place.ancestors}
        stale = {owner: obs for owner, obs in self._before.obs.items() if owner not in fresh}
        for obs in [*stale.values(), *fresh.values()]:
            found = obs.get(place.agent.name, found)
        return found

    def _transcript(self, upstream: dict[str, Call], turn: Turn) -> str | None:
        """What the last one to speak handed over, if it did so in siiRL's way."""
        if not upstream:
            return None
        order = {caller.place.id: caller.place.position for caller in self._callers}
        last = max(upstream.values(), key=lambda call: (call.turn, order[call.node]))
        return (turn if last.turn == turn.number else self._before).transcripts.get(last.node)

    def _take(self, answer: Answer, caller: Caller, turn: Turn) -> None:
        turn.done |= answer.output.done
        if answer.ids is not None:
            # Special tokens stay in: the next agent's hook gets these ids again, from its own tokenizer.
            text = caller.endpoint.tokenizer.decode(answer.ids, skip_special_tokens=False)
            turn.transcripts[caller.place.id] = text

    async def _step(self, caller: Caller, turn: Turn) -> None:
        place = caller.place
        for name in place.players:
            await turn.called[name].wait()
        for other in self._callers[: place.position]:
            if other.place.env == place.env:
                # One env stepped by several nodes: in their order, never two at once.
                await turn.finished[other.place.id].wait()
        played = [turn.calls[name] for name in place.players]
        players = [call.agent for call in played]
        ground_truth = self._episode.sample.get("ground_truth")
        result = await self._envs[place.env].step([call.text for call in played], ground_truth, players)
        turn.obs[place.id] = result.obs
        turn.done |= result.done
        if place.node.agent_options.rewards_with_env:
            for call, reward in zip(played, result.rewards, strict=True):
                call.reward = (call.reward or 0.0) + reward
        said = result.obs.get(place.agent.name)
        if place.id in turn.transcripts and isinstance(said, str):
            turn.transcripts[place.id] = said


async def _call_tool(caller: Caller, call: Call, attempt: Attempt, name: str, /, **arguments: Any) -> ToolResult:
    return await caller.call_tool(call, attempt, name, arguments)

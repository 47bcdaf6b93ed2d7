"""Environments: one instance of the user's class per episode, behind checks and time limits.

Invariant: every result is well formed (observations by agent, a finite reward per player, a bool and a JSON-able info),
or an EnvFault. Sync methods run in threads, one at a time per instance (except `close`, which may run while a step that
exceeded its limit is still running), async ones on one of a few loops that envs share: a sync method that never returns
holds up its own episode only, an async one that blocks also the others of its loop.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from numbers import Real
from typing import Any

from recipe.dag.core.errors import EnvFault, boundary, described
from recipe.dag.core.tasks import invoke, limited
from recipe.dag.episode.env_class import EnvClass
from recipe.dag.episode.event_loops import EnvLoop, OnLoop
from recipe.dag.types.convention import ENV
from recipe.dag.types.values import as_number

CLOSE_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Step:
    """The checked result of a step. `obs` by agent name; `rewards` per player."""

    obs: dict[str, Any]
    rewards: list[float]
    done: bool
    info: dict[str, Any]


class LiveEnv:
    def __init__(self, env: EnvClass, watchers: list[str], limit_s: float):
        """`watchers`: the agents that see the env. `limit_s`: the time limit for each call of a method."""
        self._env, self._watchers, self._limit_s = env, watchers, limit_s
        self._instance: Any = None
        self._loop = EnvLoop()

    async def reset(self, sample: dict[str, Any], seed: int, players: list[str]) -> dict[str, Any]:
        """Create the instance and return its first observations by agent name. `players`: agent names."""
        self._instance = await self._call("__init__", self._env.cls, **deepcopy(self._env.kwargs))
        function = getattr(self._instance, "reset", None)
        if function is None:
            return {}
        sandbox = self._env.sandbox and OnLoop(self._env.sandbox)
        offered = {"sample": sample, "seed": seed, "sandbox": sandbox, "agents": list(self._watchers)}
        where = f"{self._env.path}:reset"
        with boundary(EnvFault, where, function):
            obs = await self._call("reset", function, **{name: offered[name] for name in self._env.reset_arguments})
            return observations(obs, players, self._watchers, where)

    @property
    def tool_state(self) -> dict[str, dict[str, Any]]:
        """Return what the env adds to the tools' state of its episode, by tool name, once `reset` has returned."""
        state = getattr(self._instance, "tool_state", None) or {}
        if not isinstance(state, dict) or not all(isinstance(value, dict) for value in state.values()):
            raise EnvFault(f"`tool_state` is {described(state)}, not a dict of dicts", where=self._env.path)
        return state

    async def step(
        self,
        actions: list[str],
        ground_truth: Any,
        players: list[str],
        acted: Sequence[bool] | None = None,
        *,
        agent: str = "",
    ) -> Step:
        """Step the env. `players`: the agent of each action; `acted`: whether its node ran (by default, all did);
        `agent`: that of the node that steps."""
        where = f"{self._env.path}:step"
        args: tuple[Any, ...] = (list(actions), ground_truth)
        offered = {"agents": list(players), "agent": agent}
        kwargs: dict[str, Any] = {name: offered[name] for name in self._env.step_optional}
        if self._env.step_by_name:
            args, kwargs = (), {**dict(zip(ENV["step"].arguments, args, strict=True)), **kwargs}
        with boundary(EnvFault, where, self._instance.step):
            result = await self._call("step", self._instance.step, *args, **kwargs)
            if not isinstance(result, tuple | list) or len(result) not in (3, 4):
                raise EnvFault(
                    f"returned {described(result)}, not (obs, reward, done) or (obs, reward, done, info)", where=where
                )
            obs, reward, done, info = (*result, {})[:4]
            return Step(
                observations(obs, players, self._watchers, where),
                rewards(reward, players, where, chained=self._env.chained, acted=acted),
                _bool(done, where),
                _info(info, where),
            )

    async def close(self) -> None:
        """Call the env's `close`, if it has one and was created. Raises EnvFault."""
        function = getattr(self._instance, "close", None)
        try:
            if function is not None:
                await self._call("close", function, limit_s=min(CLOSE_LIMIT_S, self._limit_s))
        finally:
            self._loop.close()

    async def _call(self, method: str, function: Any, *args: Any, limit_s: float | None = None, **kwargs: Any) -> Any:
        where = f"{self._env.path}:{method}"
        with boundary(EnvFault, where):
            async with limited(limit_s or self._limit_s, EnvFault, method, where):
                return await invoke(function, *args, awaited=self._loop.run, **kwargs)


def observations(obs: Any, players: list[str], watchers: list[str], where: str) -> dict[str, Any]:
    """Return `obs` by agent name, without the agents that get none. A dict without any agent's name is one value for
    all agents."""
    if obs is None:
        return {}
    if isinstance(obs, list | tuple):
        if len(obs) != len(players):
            raise EnvFault(f"returned {len(obs)} observations for {len(players)} players", where=where)
        return dict(zip(players, obs, strict=True))
    if isinstance(obs, dict) and set(obs) & set(watchers):
        if unknown := set(obs) - set(watchers):
            problem = f"returned observations for {sorted(map(str, unknown))}; its agents are {watchers}"
            raise EnvFault(problem, where=where)
        return dict(obs)
    return dict.fromkeys(watchers, obs)


def rewards(
    reward: Any, players: list[str], where: str, *, chained: bool = False, acted: Sequence[bool] | None = None
) -> list[float]:
    """Return one finite reward per player.

    A reward by agent name, or one number for all agents, goes to the agent's last action if it has several; a player
    that was skipped did not act. `chained`: a single number goes to the last player only.
    """
    acted = [True] * len(players) if acted is None else acted
    last: dict[str, int] = {}
    for position, name in enumerate(players):
        if acted[position] or name not in last:  # an agent that was always skipped keeps its first position
            last[name] = position
    if hasattr(reward, "tolist"):
        reward = reward.tolist()
    if isinstance(reward, dict):
        if set(reward) != set(players):
            raise EnvFault(f"returned rewards for {sorted(map(str, reward))}; its players are {players}", where=where)
        reward = [reward[name] if last[name] == position else 0.0 for position, name in enumerate(players)]
    if not isinstance(reward, list | tuple):
        final = max((position for position, has_acted in enumerate(acted) if has_acted), default=len(players) - 1)
        paid = {final} if chained else set(last.values())
        reward = [reward if position in paid else 0.0 for position in range(len(players))]
    if len(reward) != len(players):
        raise EnvFault(f"returned {len(reward)} rewards for {len(players)} players", where=where)
    return [_finite(value, where) for value in reward]


def _bool(done: Any, where: str) -> bool:
    plain = done.tolist() if hasattr(done, "tolist") else done
    if not isinstance(plain, Real) or plain not in (0, 1):
        raise EnvFault(f"returned done = {described(done)}, not a bool", where=where)
    return bool(plain)


def _info(info: Any, where: str) -> dict[str, Any]:
    if info is None:
        return {}
    if not isinstance(info, dict):
        raise EnvFault(f"returned info = {described(info)}, not a dict", where=where)
    try:
        plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in info.items()}
        return json.loads(json.dumps(plain, allow_nan=False))  # a copy: the env may keep changing its own
    except (TypeError, ValueError) as error:
        raise EnvFault(f"returned an info that is not JSON: {error}", where=where) from error


def _finite(value: Any, where: str) -> float:
    number = as_number(value)
    if number is None:
        raise EnvFault(f"returned the reward {described(value)}, not a finite number", where=where)
    return number

"""Reward nodes: the user's functions that score a finished episode.

Invariant: a function works on a copy, so that it can neither change what is trained on nor, when it outlived its limit
and goes on in its thread, touch an episode that has been handed on. Only its return value, outcome and info are taken
over, once they are checked, and which calls it took out of training by `call.train = False`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from typing import Any

from recipe.dag.episode.copying import plain_copy
from recipe.dag.episode.number import as_number
from recipe.dag.episode.record import Call, Deferred, Episode
from recipe.dag.episode.tasks import invoke, limited
from recipe.dag.errors import RewardFault, boundary
from recipe.dag.location import defined_at
from recipe.dag.workflow.schema import Workflow
from recipe.dag.workflow.user_code import load_function


@dataclass(frozen=True, slots=True)
class RewardNode:
    """`function(episode, **kwargs) -> {agent: float | None | one float or None per call}`, sync (run in a thread) or
    async. None: it cannot score the call."""

    node: str
    """Its id, under which calls keep what it paid."""
    where: str
    function: Callable[..., Any]
    kwargs: dict[str, Any]


def load_rewards(workflow: Workflow) -> tuple[RewardNode, ...]:
    """The reward nodes in order; one without executable_ref leaves the rewards to the env. Raises UserError."""
    found = []
    for node in workflow.reward_nodes:
        if node.executable_ref is None:
            continue
        function = load_function(node.executable_ref, workflow.path, node.node_id)
        found.append(RewardNode(node.node_id, node.executable_ref, function, dict(node.executable_kwargs)))
    return tuple(found)


async def score(
    episode: Episode,
    nodes: Collection[RewardNode],
    *,
    agents: Collection[str],
    trained: Collection[str],
    limit_s: float,
    share_in_agent: bool = False,
) -> None:
    """Add every node's rewards to the calls. A float goes to the agent's last call that sampled something (its last
    one, if none did) and 0.0 to its others; what an agent gets that did not move goes nowhere. A call for which some
    node returns None is `unscored`: what others paid for it is dropped, since the sum would be incomplete.
    `share_in_agent`: then `share` them. Each agent in `trained` that has calls must get a reward, or None, from some
    node, the env or another agent. `agents`: all of the workflow. Raises RewardFault, GraderFault."""
    for node in nodes:
        copy = scratch(episode)
        copies = list(copy.calls)  # the function may change the list
        with boundary(RewardFault, node.where, node.function):
            async with limited(limit_s, RewardFault, "the reward function", node.where):
                values = await invoke(node.function, copy, **plain_copy(node.kwargs))
            episode.outcome, episode.info = _outcome(copy.outcome, node.where), _info(copy.info, node.where)
            _add(episode, values, agents, node)
        for call, changed in zip(episode.calls, copies, strict=True):
            call.train = call.train and bool(changed.train)
    for call in episode.calls:
        if call.unscored:
            call.train, call.reward, call.reward_parts = False, None, {}
    if share_in_agent:
        share(episode.calls)
    if nodes:
        settled = [call for call in episode.calls if call.reward is not None or call.unscored]
        moved, rewarded = ({c.agent for c in calls} for calls in (episode.calls, settled))
        if missing := sorted((moved - rewarded) & set(trained)):
            where = ", ".join(node.where for node in nodes)
            source = defined_at([*nodes][-1].function)
            raise RewardFault(f"no reward for {', '.join(missing)}", where=where, source=source)


def share(calls: Sequence[Call]) -> None:
    """Turn by turn, give every agent what the turn's last agent got (siiRL's share_reward_in_agent).

    The last agent is the one with the highest agent_group of those that moved in the turn and have a reward. What all
    its calls of the turn got together replaces the rewards of every other agent in it: it goes to the agent's last call
    of the turn that sampled something, and 0.0 to its others. So each agent gets a turn's reward once, however often it
    moved, and nothing beside it. Each part of the reward goes where the whole goes. A turn without any
    reward stays as it is. Where the last agent has a call that is unscored, all calls of the turn are.
    """
    for turn in dict.fromkeys(call.turn for call in calls):
        moved = [call for call in calls if call.turn == turn]
        settled = [call for call in moved if call.reward is not None or call.unscored]
        if not settled:
            continue
        last = max(settled, key=lambda call: call.agent_group).agent
        if any(call.unscored for call in settled if call.agent == last):
            for call in moved:
                call.unscored, call.train, call.reward, call.reward_parts = True, False, None, {}
            continue
        rewarded = [call for call in moved if call.reward is not None]
        paid = [call for call in rewarded if call.agent == last]
        total, parts = sum(call.reward for call in paid), _summed(paid)
        for agent in dict.fromkeys(call.agent for call in moved if call.agent != last):
            own = [call for call in moved if call.agent == agent and not call.unscored]
            at = _last_that_learns(own)
            for place, call in enumerate(own):
                call.reward, call.reward_parts = (total, dict(parts)) if place == at else (0.0, {})


def _summed(calls: Sequence[Call]) -> dict[str, float]:
    """What each node paid for them together."""
    total: dict[str, float] = {}
    for node, reward in (part for call in calls for part in call.reward_parts.items()):
        total[node] = total.get(node, 0.0) + reward
    return total


class ScratchCall(Call):
    """A call whose token lists are copied when they are first read: most reward functions read none."""

    __slots__ = ()


_TOKENS = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs")
for _name in _TOKENS:
    setattr(ScratchCall, _name, Deferred(getattr(Call, _name)))
_TREES = [field.name for field in fields(Call) if field.default_factory is dict]
_VALUES = [field.name for field in fields(Call) if field.default_factory is MISSING and field.name != "prompt_text"]


def scratch(episode: Episode) -> Episode:
    """A copy that shares nothing mutable with `episode`."""
    return replace(
        episode,
        sample=plain_copy(episode.sample),
        calls=[_copy(call) for call in episode.calls],
        results=[replace(result, parsed=plain_copy(result.parsed)) for result in episode.results],
        skips=[replace(skip) for skip in episode.skips],
        info=plain_copy(episode.info),
        fault=plain_copy(episode.fault),
        faults=plain_copy(episode.faults),
    )


def _copy(call: Call) -> ScratchCall:
    copy = ScratchCall.__new__(ScratchCall)
    for name in _TOKENS:
        setattr(copy, name, partial(list, getattr(call, name)))
    copy.prompt_text = Call.prompt_text.unread(call)
    for name in _VALUES:
        setattr(copy, name, getattr(call, name))
    for name in _TREES:
        setattr(copy, name, plain_copy(getattr(call, name)))
    copy.tool_results = [replace(result, arguments=plain_copy(result.arguments)) for result in call.tool_results]
    return copy


def _add(episode: Episode, values: Any, agents: Collection[str], node: RewardNode) -> None:
    where = node.where
    if not isinstance(values, dict):
        raise RewardFault(f"returned {type(values).__name__}, not a dict of rewards by agent name", where=where)
    if strange := [name for name in values if name not in agents]:
        raise RewardFault(f"returned rewards for {strange}; the agents are {sorted(agents)}", where=where)
    # All are checked before the first is added: an episode is scored whole or not at all.
    checked = {name: _per_call(name, value, episode.calls_of(name), where) for name, value in values.items()}
    for name, per_call in checked.items():
        for call, reward in zip(episode.calls_of(name), per_call, strict=True):
            if reward is None:
                call.unscored = True
            else:
                pay(call, node.node, reward)


def pay(call: Call, node: str, reward: float) -> None:
    """Add what a node pays to the call's reward."""
    call.reward = (call.reward or 0.0) + reward
    call.reward_parts[node] = call.reward_parts.get(node, 0.0) + reward


def _per_call(agent: str, value: Any, calls: Sequence[Call], where: str) -> list[float | None]:
    if value is None:
        return [None] * len(calls)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return _at_last(calls, _finite(value, f"the reward of {agent}", where))
    if len(value) != len(calls):
        raise RewardFault(f"returned {len(value)} rewards for the {len(calls)} calls of {agent}", where=where)
    return [None if reward is None else _finite(reward, f"a reward of {agent}", where) for reward in value]


def _at_last(calls: Sequence[Call], reward: float) -> list[float]:
    at = _last_that_learns(calls)
    return [reward if place == at else 0.0 for place in range(len(calls))]


def _last_that_learns(calls: Sequence[Call]) -> int:
    """A call whose prompt did not fit has no tokens; the last one, if all are so."""
    return max((place for place, call in enumerate(calls) if any(call.response_mask)), default=len(calls) - 1)


def _outcome(value: Any, where: str) -> float | None:
    return None if value is None else _finite(value, "episode.outcome", where)


def _finite(value: Any, what: str, where: str) -> float:
    number = as_number(value)
    if number is None:
        raise RewardFault(f"{what} is {value!r}, not a finite number", where=where)
    return number


def _info(info: Any, where: str) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise RewardFault(f"episode.info is {type(info).__name__}, not a dict", where=where)
    try:
        plain = {name: value.item() if hasattr(value, "item") else value for name, value in info.items()}
        json.dumps(plain, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RewardFault(f"episode.info is no JSON: {error}", where=where) from error
    return plain

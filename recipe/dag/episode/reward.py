"""Reward nodes: users' functions that score a finished episode, or the finished episodes of a group.

Invariant: a function works on copies, so it cannot change what is trained on, even if it exceeds its time limit and
continues in its thread. Only these are taken from it, after checks: its return value, `outcome`, `info`, and
`call.train = False`, which excludes a call from training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from typing import Any

from recipe.dag.core.errors import RewardFault, boundary
from recipe.dag.core.location import defined_at
from recipe.dag.core.tasks import invoke, limited
from recipe.dag.types.convention import REWARD
from recipe.dag.types.record import PROMPT_TEXT, TOKENS, Call, Deferred, Episode
from recipe.dag.types.values import as_number, plain_copy
from recipe.dag.workflow.schema import Workflow


@dataclass(frozen=True, slots=True)
class RewardNode:
    """`function(episode, **kwargs) -> {agent: float | None | one float or None per call}`, sync (run in a thread) or
    async. None means that it cannot score the call."""

    node: str
    """The node's id, the key of its part in `Call.reward_parts`."""
    where: str
    function: Callable[..., Any]
    kwargs: dict[str, Any]
    of_group: bool = False
    """`function(episodes, **kwargs)` gets all finished episodes of a group and returns a list of such dicts, one for
    each."""
    late: bool = False
    """The node runs when the whole group has finished: it is of the group, or comes after such a node."""


def load_rewards(workflow: Workflow) -> tuple[RewardNode, ...]:
    """Return the reward nodes in order. Raises UserError."""
    rewards: list[RewardNode] = []
    late: set[str] = set()
    for node in workflow.reward_nodes:  # in topological order
        of_group = node.scope == "group"
        if of_group or late.intersection(node.after):
            late.add(node.id)
        assert node.reward is not None, node.id
        kwargs, where = dict(node.args), f"node {node.id}"
        function = REWARD[node.scope].load(node.reward, workflow.path, where, kwargs)
        for name, convention in getattr(function, "loads", {}).items():  # options that name a function
            if isinstance(kwargs.get(name), str):
                kwargs[name] = convention.load(kwargs[name], workflow.path, where)
        reward = RewardNode(node.id, node.reward, function, kwargs, of_group, node.id in late)
        rewards.append(reward)
    return tuple(rewards)


async def score(
    episode: Episode,
    nodes: Collection[RewardNode],
    *,
    agents: Collection[str],
    trained: Collection[str],
    limit_s: float,
    share_in_agent: bool = False,
) -> None:
    """Add every node's rewards to the calls.

    A float goes to the agent's last call that sampled a token (to its last call if none did), and 0.0 to its other
    calls; the reward of an agent without calls is ignored. A call for which a node returns None is `unscored`: it loses
    the rewards of other nodes as well, since their sum would be incomplete. Raises RewardFault, GraderFault.

    agents: all agents of the workflow.
    trained: agents that must get a reward, or None, for at least one call if they have any; the env's rewards and
        shared ones count.
    share_in_agent: call `share` at the end.
    """
    for node in nodes:
        await run_reward(node, [episode], agents, limit_s)
    settle(episode, nodes, trained=trained, share_in_agent=share_in_agent)


async def run_reward(node: RewardNode, episodes: Sequence[Episode], agents: Collection[str], limit_s: float) -> None:
    """Add the rewards of one node: of the group, or of a single episode. Raises RewardFault, GraderFault; of several
    episodes, some may then be scored already."""
    copies = [scratch(episode) for episode in episodes]
    calls = [list(copy.calls) for copy in copies]  # the function may change the lists
    argument = list(copies) if node.of_group else copies[0]
    with boundary(RewardFault, node.where, node.function):
        async with limited(limit_s, RewardFault, "the reward function", node.where):
            values = await invoke(node.function, argument, **plain_copy(node.kwargs))
        for episode, copy, value in zip(episodes, copies, _per_episode(values, len(copies), node), strict=True):
            outcome = None if copy.outcome is None else _finite(copy.outcome, "episode.outcome", node.where)
            episode.outcome, episode.info = outcome, _info(copy.info, node.where)
            _add(episode, value, agents, node)
    for episode, changed_calls in zip(episodes, calls, strict=True):
        for call, changed in zip(episode.calls, changed_calls, strict=True):
            call.train = call.train and bool(changed.train)


def settle(
    episode: Episode, nodes: Collection[RewardNode], *, trained: Collection[str], share_in_agent: bool = False
) -> None:
    """Finish an episode whose `nodes` have all run: drop what could not be scored, share, and check that no agent lacks
    a reward (see `score`). Raises RewardFault."""
    for call in episode.calls:
        if call.unscored:
            _drop(call)
    if share_in_agent:
        share(episode.calls)
    if nodes:
        called = {call.agent for call in episode.calls}
        settled = {call.agent for call in episode.calls if _is_settled(call)}
        if missing := sorted((called - settled) & set(trained)):
            where = ", ".join(node.where for node in nodes)
            source = defined_at([*nodes][-1].function)
            advice = "return 0.0 for each of their calls, add a reward node that pays them, or freeze their policy"
            raise RewardFault(f"no reward for {', '.join(missing)}; {advice}", where=where, source=source)


def share(calls: Sequence[Call]) -> None:
    """Give every agent, turn by turn, the reward of the turn's last agent (`share_reward_in_agent`).

    The last agent is the one with the highest agent_group among the agents with a reward in the turn. The sum over its
    calls of the turn replaces the rewards of every other agent: it goes to the agent's last call of the turn that
    sampled a token, and 0.0 to its other calls. So each agent gets a turn's reward once, however often it was called.
    The parts of the reward are shared in the same way. A turn without any reward is left unchanged. If a call of the
    last agent is unscored, all calls of the turn become unscored.
    """
    for turn in dict.fromkeys(call.turn for call in calls):
        turn_calls = [call for call in calls if call.turn == turn]
        settled = [call for call in turn_calls if _is_settled(call)]
        if not settled:
            continue
        last_agent = max(settled, key=lambda call: call.agent_group).agent
        paid = [call for call in settled if call.agent == last_agent]
        if any(call.unscored for call in paid):
            for call in turn_calls:
                call.unscored = True
                _drop(call)
            continue
        total, parts = sum(call.reward or 0.0 for call in paid), _summed_parts(paid)
        for agent in dict.fromkeys(call.agent for call in turn_calls if call.agent != last_agent):
            scored = [call for call in turn_calls if call.agent == agent and not call.unscored]
            last = _last_sampled(scored)
            for position, call in enumerate(scored):
                call.reward, call.reward_parts = (total, dict(parts)) if position == last else (0.0, {})


def _is_settled(call: Call) -> bool:
    return call.reward is not None or call.unscored


def _drop(call: Call) -> None:
    """Take an unscored call out of training and out of the rewards."""
    call.train, call.reward, call.reward_parts = False, None, {}


def _summed_parts(calls: Sequence[Call]) -> dict[str, float]:
    total: dict[str, float] = {}
    for node, reward in (part for call in calls for part in call.reward_parts.items()):
        total[node] = total.get(node, 0.0) + reward
    return total


class ScratchCall(Call):
    """A call whose token lists are copied when they are first read: most reward functions read none of them."""

    __slots__ = ()


for _name in TOKENS:
    setattr(ScratchCall, _name, Deferred(getattr(Call, _name)))
_TREES = [field.name for field in fields(Call) if field.default_factory is dict] + ["messages", "asked", "usage"]
_VALUES = [
    field.name
    for field in fields(Call)
    if field.default_factory is MISSING and field.name not in ("prompt_text", *_TREES)
]


def scratch(episode: Episode) -> Episode:
    """Return a copy that shares nothing mutable with `episode`; that of a fork has the index of what it repeats, as its
    contexts have."""
    return replace(
        episode,
        index=episode.trunk,
        sample=plain_copy(episode.sample),
        calls=[_copy(call) for call in episode.calls],
        dropped=[_copy(call) for call in episode.dropped],
        results=[replace(result, parsed=plain_copy(result.parsed)) for result in episode.results],
        skips=[replace(skip) for skip in episode.skips],
        info=plain_copy(episode.info),
        fault=plain_copy(episode.fault),
        faults=plain_copy(episode.faults),
        usage=plain_copy(episode.usage),
        flags=plain_copy(episode.flags),
        before_group=None,
    )


def _copy(call: Call) -> ScratchCall:
    copy = ScratchCall.__new__(ScratchCall)
    for name in TOKENS:
        setattr(copy, name, partial(list, getattr(call, name)))
    PROMPT_TEXT.defer(copy, PROMPT_TEXT.raw(call))
    for name in _VALUES:
        setattr(copy, name, getattr(call, name))
    for name in _TREES:
        setattr(copy, name, plain_copy(getattr(call, name)))
    copy.tool_results = [replace(result, arguments=plain_copy(result.arguments)) for result in call.tool_results]
    return copy


def _per_episode(values: Any, count: int, node: RewardNode) -> Sequence[Any]:
    """Return what the node's function returned for each of `count` episodes."""
    if not node.of_group:
        return [values]
    if not isinstance(values, list | tuple):
        problem = f"returned {type(values).__name__}, not a list with a dict of rewards for each of the episodes"
        raise RewardFault(problem, where=node.where)
    if len(values) != count:
        raise RewardFault(f"returned {len(values)} dicts of rewards for {count} episodes", where=node.where)
    return values


def _add(episode: Episode, values: Any, agents: Collection[str], node: RewardNode) -> None:
    where = node.where
    if not isinstance(values, dict):
        raise RewardFault(f"returned {type(values).__name__}, not a dict of rewards by agent name", where=where)
    if strange := [name for name in values if name not in agents]:
        raise RewardFault(f"returned rewards for {strange}; the agents are {sorted(agents)}", where=where)
    # All are checked before the first is added, so that an episode is never scored in part.
    checked = {name: _per_call(name, value, episode.calls_of(name), where) for name, value in values.items()}
    for name, per_call in checked.items():
        for call, reward in zip(episode.calls_of(name), per_call, strict=True):
            if reward is None:
                call.unscored = True
            else:
                pay(call, node.node, reward)


def pay(call: Call, node: str, reward: float) -> None:
    """Add a node's reward for the call, in total and as the node's part."""
    call.reward = (call.reward or 0.0) + reward
    call.reward_parts[node] = call.reward_parts.get(node, 0.0) + reward


def _per_call(agent: str, value: Any, calls: Sequence[Call], where: str) -> Sequence[float | None]:
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
    last = _last_sampled(calls)
    return [reward if position == last else 0.0 for position in range(len(calls))]


def _last_sampled(calls: Sequence[Call]) -> int:
    """Return the position of the last call that sampled a token (a call whose prompt did not fit has none), or of the
    last call if none did."""
    sampled = (position for position, call in enumerate(calls) if any(call.response_mask))
    return max(sampled, default=len(calls) - 1)


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
        raise RewardFault(f"episode.info is not JSON: {error}", where=where) from error
    return plain

"""Calls excluded from the policy loss, void turns, and penalties for overlong calls (DAPO, arXiv 2503.14476;
SimpleTIR, arXiv 2509.02479).

Invariant: an excluded call stays in its row: it counts in baselines and groups, critics learn from it, and HAPPO's
factors include it. Pure except for `penalise_overlong`, which changes the rewards of the episodes passed to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean

from recipe.dag.algorithms.blocks import OVERLONG
from recipe.dag.episode.reward import pay
from recipe.dag.reward.outcome import answer_of
from recipe.dag.types.record import Call, Episode
from recipe.dag.workflow.schema import Workflow


def outside_loss(episode: Episode, workflow: Workflow) -> set[int]:
    """Return the positions in `Episode.all_calls` of the calls that the algorithm excludes from the loss: with
    `overlong.mask` those that a limit cut off; with `drop_void_turns` all calls of an agent that had a void turn."""
    algorithm, positions = workflow.algorithm, set()
    if algorithm.overlong is not None and algorithm.overlong.mask:
        covers = algorithm.overlong.covers
        positions |= {n for n, call in enumerate(episode.all_calls) if is_truncated(call) and covers(call.agent)}
    if algorithm.drop_void_turns:
        void = _void_turns([episode], workflow)
        void_agents = {agent for agent, turns in void.items() if any(turns)}
        positions |= {position for position, call in enumerate(episode.all_calls) if call.agent in void_agents}
    return positions


def is_truncated(call: Call) -> bool:
    """Return whether a limit on tokens or generations ended the call."""
    return call.stop_reason in ("length", "max_generations")


def is_void(call: Call, *, loops: bool) -> bool:
    """Return whether a turn of the model gave neither code nor an answer.

    With `loops` the engine runs the tools, so every generation except the last called one; without it the agent's hook
    runs them after the only generation."""
    if 1 not in call.response_mask:  # the prompt did not fit, so the model never had a turn
        return False
    acted = call.ended_in_tool_call if loops else any(result.status != "invalid" for result in call.tool_results)
    return not acted and not (answer_of(call) or "").strip()


def void_metrics(episodes: Sequence[Episode], workflow: Workflow) -> dict[str, float]:
    """Return `agent/<name>/void_turns`, the share of calls with a void turn, of agents with tools that were called."""
    good = [episode for episode in episodes if episode.fault is None]
    void = _void_turns(good, workflow)
    return {f"agent/{agent}/void_turns": fmean(turns) for agent, turns in void.items() if turns}


def _void_turns(episodes: Sequence[Episode], workflow: Workflow) -> dict[str, list[bool]]:
    """Return agent with tools -> whether each of its calls is void."""
    has_loop = {agent.name: agent.tool_loop is not None for agent in workflow.agents if agent.tools}
    void: dict[str, list[bool]] = {agent: [] for agent in has_loop}
    for call in (call for episode in episodes for call in episode.calls if call.agent in has_loop):
        void[call.agent].append(is_void(call, loops=has_loop[call.agent]))
    return void


def penalise_overlong(episodes: Sequence[Episode], workflow: Workflow, max_response_length: int) -> None:
    """Add the length penalty to the reward of each scored call of a trained policy, as its part `overlong`.

    max_response_length: limit of a call, tool results included, in tokens
    """
    options = workflow.algorithm.overlong
    if options is None or options.penalty is None:
        return
    limits = {agent.name: agent.sampling.max_tokens for agent in workflow.agents}
    trained = set(workflow.trained_policies())
    for episode in episodes:
        if episode.fault is not None:
            continue
        for call in episode.calls:
            if call.reward is None or call.policy not in trained or not options.covers(call.agent):
                continue
            share = overlong_share(call, limits[call.agent], max_response_length, options.penalty.buffer)
            if share > 0.0:
                pay(call, OVERLONG, -options.penalty.weight * share)


def overlong_share(call: Call, limit: int, call_limit: int, buffer: int) -> float:
    """Return how far the call's longest generation reaches into the last `buffer` of `limit` tokens, or the whole call
    into those of `call_limit`, from 0 (not at all) to 1 (up to a limit, or cut off)."""
    if call.stop_reason == "length" and any(call.response_mask):
        return 1.0
    longest = max((len(list(run)) for sampled, run in groupby(call.response_mask) if sampled), default=0)
    excess = max(longest - (limit - buffer), len(call.response_mask) - (call_limit - buffer))
    return min(max(excess / buffer, 0.0), 1.0)
